from triptych.v1 import instance_pb2 as _instance_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_KIND_UNSPECIFIED: _ClassVar[MemberKind]
    MEMBER_KIND_INSTANCE: _ClassVar[MemberKind]
    MEMBER_KIND_ROUTER: _ClassVar[MemberKind]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_ACTIVE: _ClassVar[MemberState]
    MEMBER_STATE_LEAVING: _ClassVar[MemberState]
    MEMBER_STATE_LEFT: _ClassVar[MemberState]

class OrderKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_KIND_UNSPECIFIED: _ClassVar[OrderKind]
    ORDER_KIND_REGISTERED: _ClassVar[OrderKind]
    ORDER_KIND_REREGISTER: _ClassVar[OrderKind]
    ORDER_KIND_DRAIN: _ClassVar[OrderKind]
    ORDER_KIND_SWITCH: _ClassVar[OrderKind]
    ORDER_KIND_LIMITS: _ClassVar[OrderKind]

class Departure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEPARTURE_UNSPECIFIED: _ClassVar[Departure]
    DEPARTURE_LEFT: _ClassVar[Departure]
    DEPARTURE_LOST: _ClassVar[Departure]

class Condition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONDITION_UNSPECIFIED: _ClassVar[Condition]
    CONDITION_ACTIVE: _ClassVar[Condition]
    CONDITION_LEAVING: _ClassVar[Condition]
    CONDITION_DRAINED: _ClassVar[Condition]

class PoolState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_STATE_UNSPECIFIED: _ClassVar[PoolState]
    POOL_STATE_STEADY: _ClassVar[PoolState]
    POOL_STATE_GROWING: _ClassVar[PoolState]
    POOL_STATE_SHRINKING: _ClassVar[PoolState]
    POOL_STATE_BREACH: _ClassVar[PoolState]
    POOL_STATE_FROZEN: _ClassVar[PoolState]

class Why(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHY_UNSPECIFIED: _ClassVar[Why]
    WHY_LOAD: _ClassVar[Why]
    WHY_WAIT: _ClassVar[Why]
    WHY_BREACH: _ClassVar[Why]
    WHY_BOUNDS: _ClassVar[Why]
    WHY_OVERRIDE: _ClassVar[Why]
    WHY_LOW_LOAD: _ClassVar[Why]
    WHY_STEADY: _ClassVar[Why]
    WHY_FROZEN: _ClassVar[Why]
    WHY_NO_REPORT: _ClassVar[Why]
    WHY_NOT_CURED: _ClassVar[Why]
    WHY_SICK: _ClassVar[Why]
    WHY_SATURATED: _ClassVar[Why]
    WHY_COOLDOWN: _ClassVar[Why]
    WHY_BUDGET: _ClassVar[Why]
    WHY_SETTLING: _ClassVar[Why]
    WHY_CAUTION: _ClassVar[Why]
    WHY_LIMITS: _ClassVar[Why]
    WHY_TIER: _ClassVar[Why]
    WHY_DEGREE: _ClassVar[Why]
    WHY_PLAN: _ClassVar[Why]

class Acting(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTING_UNSPECIFIED: _ClassVar[Acting]
    ACTING_NONE: _ClassVar[Acting]
    ACTING_MANUAL: _ClassVar[Acting]
    ACTING_ALL: _ClassVar[Acting]

class DecisionOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_OUTCOME_UNSPECIFIED: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_PENDING: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_DONE: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_ADVISED: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_REPLACED: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_FAILED: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_TIMED_OUT: _ClassVar[DecisionOutcome]

class PlanOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_OUTCOME_UNSPECIFIED: _ClassVar[PlanOutcome]
    PLAN_OUTCOME_KEPT: _ClassVar[PlanOutcome]
    PLAN_OUTCOME_ADVISED: _ClassVar[PlanOutcome]
    PLAN_OUTCOME_MOVING: _ClassVar[PlanOutcome]
    PLAN_OUTCOME_MOVED: _ClassVar[PlanOutcome]
    PLAN_OUTCOME_FAILED: _ClassVar[PlanOutcome]
MEMBER_KIND_UNSPECIFIED: MemberKind
MEMBER_KIND_INSTANCE: MemberKind
MEMBER_KIND_ROUTER: MemberKind
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_ACTIVE: MemberState
MEMBER_STATE_LEAVING: MemberState
MEMBER_STATE_LEFT: MemberState
ORDER_KIND_UNSPECIFIED: OrderKind
ORDER_KIND_REGISTERED: OrderKind
ORDER_KIND_REREGISTER: OrderKind
ORDER_KIND_DRAIN: OrderKind
ORDER_KIND_SWITCH: OrderKind
ORDER_KIND_LIMITS: OrderKind
DEPARTURE_UNSPECIFIED: Departure
DEPARTURE_LEFT: Departure
DEPARTURE_LOST: Departure
CONDITION_UNSPECIFIED: Condition
CONDITION_ACTIVE: Condition
CONDITION_LEAVING: Condition
CONDITION_DRAINED: Condition
POOL_STATE_UNSPECIFIED: PoolState
POOL_STATE_STEADY: PoolState
POOL_STATE_GROWING: PoolState
POOL_STATE_SHRINKING: PoolState
POOL_STATE_BREACH: PoolState
POOL_STATE_FROZEN: PoolState
WHY_UNSPECIFIED: Why
WHY_LOAD: Why
WHY_WAIT: Why
WHY_BREACH: Why
WHY_BOUNDS: Why
WHY_OVERRIDE: Why
WHY_LOW_LOAD: Why
WHY_STEADY: Why
WHY_FROZEN: Why
WHY_NO_REPORT: Why
WHY_NOT_CURED: Why
WHY_SICK: Why
WHY_SATURATED: Why
WHY_COOLDOWN: Why
WHY_BUDGET: Why
WHY_SETTLING: Why
WHY_CAUTION: Why
WHY_LIMITS: Why
WHY_TIER: Why
WHY_DEGREE: Why
WHY_PLAN: Why
ACTING_UNSPECIFIED: Acting
ACTING_NONE: Acting
ACTING_MANUAL: Acting
ACTING_ALL: Acting
DECISION_OUTCOME_UNSPECIFIED: DecisionOutcome
DECISION_OUTCOME_PENDING: DecisionOutcome
DECISION_OUTCOME_DONE: DecisionOutcome
DECISION_OUTCOME_ADVISED: DecisionOutcome
DECISION_OUTCOME_REPLACED: DecisionOutcome
DECISION_OUTCOME_FAILED: DecisionOutcome
DECISION_OUTCOME_TIMED_OUT: DecisionOutcome
PLAN_OUTCOME_UNSPECIFIED: PlanOutcome
PLAN_OUTCOME_KEPT: PlanOutcome
PLAN_OUTCOME_ADVISED: PlanOutcome
PLAN_OUTCOME_MOVING: PlanOutcome
PLAN_OUTCOME_MOVED: PlanOutcome
PLAN_OUTCOME_FAILED: PlanOutcome

class Tier(_message.Message):
    __slots__ = ("name", "device", "usd_per_hour", "speed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    name: str
    device: str
    usd_per_hour: float
    speed: float
    def __init__(self, name: _Optional[str] = ..., device: _Optional[str] = ..., usd_per_hour: _Optional[float] = ..., speed: _Optional[float] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("kind", "instance_id", "epoch", "address", "model", "revision", "role", "arena_bytes", "max_items", "kv_tokens", "transports", "parts", "slo", "switchable", "tier", "metrics")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    SWITCHABLE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    kind: MemberKind
    instance_id: str
    epoch: int
    address: str
    model: str
    revision: str
    role: _instance_pb2.Role
    arena_bytes: int
    max_items: int
    kv_tokens: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    parts: _containers.RepeatedCompositeFieldContainer[_instance_pb2.ServedPart]
    slo: _containers.RepeatedScalarFieldContainer[str]
    switchable: _instance_pb2.Role
    tier: Tier
    metrics: str
    def __init__(self, kind: _Optional[_Union[MemberKind, str]] = ..., instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., role: _Optional[_Union[_instance_pb2.Role, str]] = ..., arena_bytes: _Optional[int] = ..., max_items: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., parts: _Optional[_Iterable[_Union[_instance_pb2.ServedPart, _Mapping]]] = ..., slo: _Optional[_Iterable[str]] = ..., switchable: _Optional[_Union[_instance_pb2.Role, str]] = ..., tier: _Optional[_Union[Tier, _Mapping]] = ..., metrics: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "load", "drained")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    load: _instance_pb2.InstanceLoad
    drained: bool
    def __init__(self, sequence: _Optional[int] = ..., load: _Optional[_Union[_instance_pb2.InstanceLoad, _Mapping]] = ..., drained: _Optional[bool] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Judged(_message.Message):
    __slots__ = ("met", "missed")
    MET_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    met: int
    missed: int
    def __init__(self, met: _Optional[int] = ..., missed: _Optional[int] = ...) -> None: ...

class Sketch(_message.Message):
    __slots__ = ("first", "counts")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    first: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class ClassWindow(_message.Message):
    __slots__ = ("arrivals", "items", "media_tokens", "media_bytes", "pixels", "prompt_tokens", "output_tokens", "cached_tokens", "finished_media_tokens", "done", "failed", "cancelled", "impatient", "ttft", "missed_prepare", "missed_encode", "missed_prefill", "missed_uncharged", "tbt", "e2e", "not_judged", "gaps", "gaps_over", "ttft_s", "tbt_s", "e2e_s")
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_MEDIA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    IMPATIENT_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    MISSED_PREPARE_FIELD_NUMBER: _ClassVar[int]
    MISSED_ENCODE_FIELD_NUMBER: _ClassVar[int]
    MISSED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    MISSED_UNCHARGED_FIELD_NUMBER: _ClassVar[int]
    TBT_FIELD_NUMBER: _ClassVar[int]
    E2E_FIELD_NUMBER: _ClassVar[int]
    NOT_JUDGED_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    GAPS_OVER_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TBT_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    arrivals: int
    items: int
    media_tokens: int
    media_bytes: int
    pixels: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    finished_media_tokens: int
    done: int
    failed: int
    cancelled: int
    impatient: int
    ttft: Judged
    missed_prepare: int
    missed_encode: int
    missed_prefill: int
    missed_uncharged: int
    tbt: Judged
    e2e: Judged
    not_judged: int
    gaps: int
    gaps_over: int
    ttft_s: Sketch
    tbt_s: Sketch
    e2e_s: Sketch
    def __init__(self, arrivals: _Optional[int] = ..., items: _Optional[int] = ..., media_tokens: _Optional[int] = ..., media_bytes: _Optional[int] = ..., pixels: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., finished_media_tokens: _Optional[int] = ..., done: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., impatient: _Optional[int] = ..., ttft: _Optional[_Union[Judged, _Mapping]] = ..., missed_prepare: _Optional[int] = ..., missed_encode: _Optional[int] = ..., missed_prefill: _Optional[int] = ..., missed_uncharged: _Optional[int] = ..., tbt: _Optional[_Union[Judged, _Mapping]] = ..., e2e: _Optional[_Union[Judged, _Mapping]] = ..., not_judged: _Optional[int] = ..., gaps: _Optional[int] = ..., gaps_over: _Optional[int] = ..., ttft_s: _Optional[_Union[Sketch, _Mapping]] = ..., tbt_s: _Optional[_Union[Sketch, _Mapping]] = ..., e2e_s: _Optional[_Union[Sketch, _Mapping]] = ...) -> None: ...

class NamedClass(_message.Message):
    __slots__ = ("name", "window")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    window: ClassWindow
    def __init__(self, name: _Optional[str] = ..., window: _Optional[_Union[ClassWindow, _Mapping]] = ...) -> None: ...

class NamedInstance(_message.Message):
    __slots__ = ("instance_id", "judged")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    judged: Judged
    def __init__(self, instance_id: _Optional[str] = ..., judged: _Optional[_Union[Judged, _Mapping]] = ...) -> None: ...

class Refusals(_message.Message):
    __slots__ = ("overloaded", "other")
    OVERLOADED_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    overloaded: int
    other: int
    def __init__(self, overloaded: _Optional[int] = ..., other: _Optional[int] = ...) -> None: ...

class WindowReport(_message.Message):
    __slots__ = ("epoch", "sequence", "duration_s", "age_s", "model", "classes", "instances", "refusals", "waiting", "waiting_media_tokens", "waiting_prompt_tokens", "forms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_MEDIA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORMS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    duration_s: float
    age_s: float
    model: str
    classes: _containers.RepeatedCompositeFieldContainer[NamedClass]
    instances: _containers.RepeatedCompositeFieldContainer[NamedInstance]
    refusals: Refusals
    waiting: int
    waiting_media_tokens: int
    waiting_prompt_tokens: int
    forms: _containers.RepeatedCompositeFieldContainer[Form]
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., duration_s: _Optional[float] = ..., age_s: _Optional[float] = ..., model: _Optional[str] = ..., classes: _Optional[_Iterable[_Union[NamedClass, _Mapping]]] = ..., instances: _Optional[_Iterable[_Union[NamedInstance, _Mapping]]] = ..., refusals: _Optional[_Union[Refusals, _Mapping]] = ..., waiting: _Optional[int] = ..., waiting_media_tokens: _Optional[int] = ..., waiting_prompt_tokens: _Optional[int] = ..., forms: _Optional[_Iterable[_Union[Form, _Mapping]]] = ...) -> None: ...

class Form(_message.Message):
    __slots__ = ("kind", "requests", "answered", "items", "pixels", "frames", "seconds", "prompt_tokens", "output_tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    requests: int
    answered: int
    items: int
    pixels: int
    frames: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    def __init__(self, kind: _Optional[str] = ..., requests: _Optional[int] = ..., answered: _Optional[int] = ..., items: _Optional[int] = ..., pixels: _Optional[int] = ..., frames: _Optional[int] = ..., seconds: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class MemberReport(_message.Message):
    __slots__ = ("registration", "heartbeat", "farewell", "window")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    heartbeat: Heartbeat
    farewell: Farewell
    window: WindowReport
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., window: _Optional[_Union[WindowReport, _Mapping]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("kind", "reason", "role", "version", "limits", "by_hand")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    BY_HAND_FIELD_NUMBER: _ClassVar[int]
    kind: OrderKind
    reason: str
    role: _instance_pb2.Role
    version: int
    limits: _instance_pb2.InstanceLimits
    by_hand: bool
    def __init__(self, kind: _Optional[_Union[OrderKind, str]] = ..., reason: _Optional[str] = ..., role: _Optional[_Union[_instance_pb2.Role, str]] = ..., version: _Optional[int] = ..., limits: _Optional[_Union[_instance_pb2.InstanceLimits, _Mapping]] = ..., by_hand: _Optional[bool] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("address", "state", "role", "model", "epoch", "kind", "suspected")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: MemberState
    role: _instance_pb2.Role
    model: str
    epoch: int
    kind: MemberKind
    suspected: bool
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[MemberState, str]] = ..., role: _Optional[_Union[_instance_pb2.Role, str]] = ..., model: _Optional[str] = ..., epoch: _Optional[int] = ..., kind: _Optional[_Union[MemberKind, str]] = ..., suspected: _Optional[bool] = ...) -> None: ...

class Removal(_message.Message):
    __slots__ = ("address", "departure")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEPARTURE_FIELD_NUMBER: _ClassVar[int]
    address: str
    departure: Departure
    def __init__(self, address: _Optional[str] = ..., departure: _Optional[_Union[Departure, str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("incarnation", "version", "model", "kinds", "metrics")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    model: str
    kinds: _containers.RepeatedScalarFieldContainer[MemberKind]
    metrics: str
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ..., model: _Optional[str] = ..., kinds: _Optional[_Iterable[_Union[MemberKind, str]]] = ..., metrics: _Optional[str] = ...) -> None: ...

class MembershipDelta(_message.Message):
    __slots__ = ("incarnation", "version", "full", "members", "removed")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    full: bool
    members: _containers.RepeatedCompositeFieldContainer[Member]
    removed: _containers.RepeatedCompositeFieldContainer[Removal]
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ..., full: _Optional[bool] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., removed: _Optional[_Iterable[_Union[Removal, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("registration", "condition", "suspected", "load", "since_s", "heard_s", "wanted", "wanted_s", "open_s", "served_s")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    HEARD_S_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    WANTED_S_FIELD_NUMBER: _ClassVar[int]
    OPEN_S_FIELD_NUMBER: _ClassVar[int]
    SERVED_S_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    condition: Condition
    suspected: bool
    load: _instance_pb2.InstanceLoad
    since_s: float
    heard_s: float
    wanted: _instance_pb2.Role
    wanted_s: float
    open_s: float
    served_s: float
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., condition: _Optional[_Union[Condition, str]] = ..., suspected: _Optional[bool] = ..., load: _Optional[_Union[_instance_pb2.InstanceLoad, _Mapping]] = ..., since_s: _Optional[float] = ..., heard_s: _Optional[float] = ..., wanted: _Optional[_Union[_instance_pb2.Role, str]] = ..., wanted_s: _Optional[float] = ..., open_s: _Optional[float] = ..., served_s: _Optional[float] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("model", "role", "members", "scaling", "tier")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _instance_pb2.Role
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    scaling: ScalingStatus
    tier: str
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_instance_pb2.Role, str]] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., scaling: _Optional[_Union[ScalingStatus, _Mapping]] = ..., tier: _Optional[str] = ...) -> None: ...

class Reason(_message.Message):
    __slots__ = ("why", "text")
    WHY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    why: Why
    text: str
    def __init__(self, why: _Optional[_Union[Why, str]] = ..., text: _Optional[str] = ...) -> None: ...

class PoolLoad(_message.Message):
    __slots__ = ("burst_per_s", "short_per_s", "long_per_s", "peak_per_s", "waiting", "coverage", "announced")
    BURST_PER_S_FIELD_NUMBER: _ClassVar[int]
    SHORT_PER_S_FIELD_NUMBER: _ClassVar[int]
    LONG_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    burst_per_s: float
    short_per_s: float
    long_per_s: float
    peak_per_s: float
    waiting: float
    coverage: float
    announced: float
    def __init__(self, burst_per_s: _Optional[float] = ..., short_per_s: _Optional[float] = ..., long_per_s: _Optional[float] = ..., peak_per_s: _Optional[float] = ..., waiting: _Optional[float] = ..., coverage: _Optional[float] = ..., announced: _Optional[float] = ...) -> None: ...

class SizeBounds(_message.Message):
    __slots__ = ("least", "most")
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    least: int
    most: int
    def __init__(self, least: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class Override(_message.Message):
    __slots__ = ("size", "left_s")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    size: int
    left_s: float
    def __init__(self, size: _Optional[int] = ..., left_s: _Optional[float] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("number", "age_s", "wanted", "target", "reasons", "drain", "sick", "missing", "ready", "starting", "draining", "load", "capacity_per_s", "needed", "attainment", "report_age_s", "outcome", "detail")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    SICK_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_PER_S_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    number: int
    age_s: float
    wanted: int
    target: int
    reasons: _containers.RepeatedCompositeFieldContainer[Reason]
    drain: str
    sick: str
    missing: _containers.RepeatedScalarFieldContainer[str]
    ready: int
    starting: int
    draining: int
    load: PoolLoad
    capacity_per_s: float
    needed: int
    attainment: Judged
    report_age_s: float
    outcome: DecisionOutcome
    detail: str
    def __init__(self, number: _Optional[int] = ..., age_s: _Optional[float] = ..., wanted: _Optional[int] = ..., target: _Optional[int] = ..., reasons: _Optional[_Iterable[_Union[Reason, _Mapping]]] = ..., drain: _Optional[str] = ..., sick: _Optional[str] = ..., missing: _Optional[_Iterable[str]] = ..., ready: _Optional[int] = ..., starting: _Optional[int] = ..., draining: _Optional[int] = ..., load: _Optional[_Union[PoolLoad, _Mapping]] = ..., capacity_per_s: _Optional[float] = ..., needed: _Optional[int] = ..., attainment: _Optional[_Union[Judged, _Mapping]] = ..., report_age_s: _Optional[float] = ..., outcome: _Optional[_Union[DecisionOutcome, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class ScalingStatus(_message.Message):
    __slots__ = ("name", "state", "acting", "wanted", "ready", "starting", "draining", "bounds", "attainment", "override", "fault", "decisions", "advice", "attainment_window_s", "rolling")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ACTING_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    OVERRIDE_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    ROLLING_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: PoolState
    acting: Acting
    wanted: int
    ready: int
    starting: int
    draining: int
    bounds: SizeBounds
    attainment: Judged
    override: Override
    fault: str
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    advice: _containers.RepeatedScalarFieldContainer[str]
    attainment_window_s: float
    rolling: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[PoolState, str]] = ..., acting: _Optional[_Union[Acting, str]] = ..., wanted: _Optional[int] = ..., ready: _Optional[int] = ..., starting: _Optional[int] = ..., draining: _Optional[int] = ..., bounds: _Optional[_Union[SizeBounds, _Mapping]] = ..., attainment: _Optional[_Union[Judged, _Mapping]] = ..., override: _Optional[_Union[Override, _Mapping]] = ..., fault: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., advice: _Optional[_Iterable[str]] = ..., attainment_window_s: _Optional[float] = ..., rolling: _Optional[str] = ...) -> None: ...

class ManagerStatus(_message.Message):
    __slots__ = ("incarnation", "version", "up_s", "watchers", "pools", "leads", "leader", "store_fault", "plan")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    STORE_FAULT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    up_s: float
    watchers: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    leads: bool
    leader: str
    store_fault: str
    plan: PlanStatus
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ..., up_s: _Optional[float] = ..., watchers: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., leads: _Optional[bool] = ..., leader: _Optional[str] = ..., store_fault: _Optional[str] = ..., plan: _Optional[_Union[PlanStatus, _Mapping]] = ...) -> None: ...

class Drift(_message.Message):
    __slots__ = ("figure", "index", "bound")
    FIGURE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    figure: str
    index: float
    bound: float
    def __init__(self, figure: _Optional[str] = ..., index: _Optional[float] = ..., bound: _Optional[float] = ...) -> None: ...

class RoleCount(_message.Message):
    __slots__ = ("role", "count", "tier")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    role: _instance_pb2.Role
    count: int
    tier: str
    def __init__(self, role: _Optional[_Union[_instance_pb2.Role, str]] = ..., count: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class PlanDecision(_message.Message):
    __slots__ = ("number", "age_s", "present", "wanted", "gain", "reason", "outcome")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    number: int
    age_s: float
    present: _containers.RepeatedCompositeFieldContainer[RoleCount]
    wanted: _containers.RepeatedCompositeFieldContainer[RoleCount]
    gain: float
    reason: str
    outcome: PlanOutcome
    def __init__(self, number: _Optional[int] = ..., age_s: _Optional[float] = ..., present: _Optional[_Iterable[_Union[RoleCount, _Mapping]]] = ..., wanted: _Optional[_Iterable[_Union[RoleCount, _Mapping]]] = ..., gain: _Optional[float] = ..., reason: _Optional[str] = ..., outcome: _Optional[_Union[PlanOutcome, str]] = ...) -> None: ...

class PlanStatus(_message.Message):
    __slots__ = ("model", "replans", "present", "drifts", "state", "decisions")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLANS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    DRIFTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    replans: bool
    present: _containers.RepeatedCompositeFieldContainer[RoleCount]
    drifts: _containers.RepeatedCompositeFieldContainer[Drift]
    state: str
    decisions: _containers.RepeatedCompositeFieldContainer[PlanDecision]
    def __init__(self, model: _Optional[str] = ..., replans: _Optional[bool] = ..., present: _Optional[_Iterable[_Union[RoleCount, _Mapping]]] = ..., drifts: _Optional[_Iterable[_Union[Drift, _Mapping]]] = ..., state: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[PlanDecision, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("instance_id", "force")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    force: bool
    def __init__(self, instance_id: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchRequest(_message.Message):
    __slots__ = ("instance_id", "role", "force")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: _instance_pb2.Role
    force: bool
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[_Union[_instance_pb2.Role, str]] = ..., force: _Optional[bool] = ...) -> None: ...

class SwitchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("instance_id", "limits")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    limits: _instance_pb2.InstanceLimits
    def __init__(self, instance_id: _Optional[str] = ..., limits: _Optional[_Union[_instance_pb2.InstanceLimits, _Mapping]] = ...) -> None: ...

class SetLimitsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetSizeRequest(_message.Message):
    __slots__ = ("model", "role", "size", "for_s", "tier")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _instance_pb2.Role
    size: int
    for_s: float
    tier: str
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_instance_pb2.Role, str]] = ..., size: _Optional[int] = ..., for_s: _Optional[float] = ..., tier: _Optional[str] = ...) -> None: ...

class SetSizeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollRequest(_message.Message):
    __slots__ = ("model", "role", "tier", "degree")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    DEGREE_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _instance_pb2.Role
    tier: str
    degree: int
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_instance_pb2.Role, str]] = ..., tier: _Optional[str] = ..., degree: _Optional[int] = ...) -> None: ...

class RollResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
