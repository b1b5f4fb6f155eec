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
DEPARTURE_UNSPECIFIED: Departure
DEPARTURE_LEFT: Departure
DEPARTURE_LOST: Departure
CONDITION_UNSPECIFIED: Condition
CONDITION_ACTIVE: Condition
CONDITION_LEAVING: Condition
CONDITION_DRAINED: Condition

class Registration(_message.Message):
    __slots__ = ("kind", "instance_id", "epoch", "address", "model", "revision", "role", "arena_bytes", "max_items", "kv_tokens", "transports", "parts", "slo")
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
    def __init__(self, kind: _Optional[_Union[MemberKind, str]] = ..., instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., role: _Optional[_Union[_instance_pb2.Role, str]] = ..., arena_bytes: _Optional[int] = ..., max_items: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., parts: _Optional[_Iterable[_Union[_instance_pb2.ServedPart, _Mapping]]] = ..., slo: _Optional[_Iterable[str]] = ...) -> None: ...

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
    __slots__ = ("epoch", "sequence", "duration_s", "age_s", "model", "classes", "instances", "refusals", "waiting", "waiting_media_tokens", "waiting_prompt_tokens")
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
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., duration_s: _Optional[float] = ..., age_s: _Optional[float] = ..., model: _Optional[str] = ..., classes: _Optional[_Iterable[_Union[NamedClass, _Mapping]]] = ..., instances: _Optional[_Iterable[_Union[NamedInstance, _Mapping]]] = ..., refusals: _Optional[_Union[Refusals, _Mapping]] = ..., waiting: _Optional[int] = ..., waiting_media_tokens: _Optional[int] = ..., waiting_prompt_tokens: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("kind", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: OrderKind
    reason: str
    def __init__(self, kind: _Optional[_Union[OrderKind, str]] = ..., reason: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("incarnation", "version", "model", "kinds")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    model: str
    kinds: _containers.RepeatedScalarFieldContainer[MemberKind]
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ..., model: _Optional[str] = ..., kinds: _Optional[_Iterable[_Union[MemberKind, str]]] = ...) -> None: ...

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
    __slots__ = ("registration", "condition", "suspected", "load", "since_s", "heard_s")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    HEARD_S_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    condition: Condition
    suspected: bool
    load: _instance_pb2.InstanceLoad
    since_s: float
    heard_s: float
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., condition: _Optional[_Union[Condition, str]] = ..., suspected: _Optional[bool] = ..., load: _Optional[_Union[_instance_pb2.InstanceLoad, _Mapping]] = ..., since_s: _Optional[float] = ..., heard_s: _Optional[float] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("model", "role", "members")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _instance_pb2.Role
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_instance_pb2.Role, str]] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ...) -> None: ...

class ManagerStatus(_message.Message):
    __slots__ = ("incarnation", "version", "up_s", "watchers", "pools")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    up_s: float
    watchers: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ..., up_s: _Optional[float] = ..., watchers: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
