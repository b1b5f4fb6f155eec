from triptych.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Placement(_message.Message):
    __slots__ = ("item", "start", "ticket", "continues")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    item: int
    start: int
    ticket: _common_pb2.Ticket
    continues: bool
    def __init__(self, item: _Optional[int] = ..., start: _Optional[int] = ..., ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., continues: _Optional[bool] = ...) -> None: ...

class TextRequest(_message.Message):
    __slots__ = ("request_id", "model", "token_ids", "placements", "sampling", "priority", "tenant_salt", "position", "continued", "early", "transfers_kv", "kv_segments", "kv_lease_s", "whole", "lora")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_KV_FIELD_NUMBER: _ClassVar[int]
    KV_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    KV_LEASE_S_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    sampling: _common_pb2.SamplingParams
    priority: int
    tenant_salt: bytes
    position: _common_pb2.RelativeQueuePosition
    continued: _containers.RepeatedCompositeFieldContainer[_common_pb2.ContinuedChoice]
    early: bool
    transfers_kv: bool
    kv_segments: _containers.RepeatedCompositeFieldContainer[KvPlacement]
    kv_lease_s: float
    whole: bool
    lora: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., tenant_salt: _Optional[bytes] = ..., position: _Optional[_Union[_common_pb2.RelativeQueuePosition, _Mapping]] = ..., continued: _Optional[_Iterable[_Union[_common_pb2.ContinuedChoice, _Mapping]]] = ..., early: _Optional[bool] = ..., transfers_kv: _Optional[bool] = ..., kv_segments: _Optional[_Iterable[_Union[KvPlacement, _Mapping]]] = ..., kv_lease_s: _Optional[float] = ..., whole: _Optional[bool] = ..., lora: _Optional[str] = ...) -> None: ...

class KvPlacement(_message.Message):
    __slots__ = ("first", "ticket", "choices")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    first: int
    ticket: _common_pb2.Ticket
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class SealedSegment(_message.Message):
    __slots__ = ("placement", "router_lease")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_LEASE_FIELD_NUMBER: _ClassVar[int]
    placement: KvPlacement
    router_lease: bytes
    def __init__(self, placement: _Optional[_Union[KvPlacement, _Mapping]] = ..., router_lease: _Optional[bytes] = ...) -> None: ...

class KvTransferred(_message.Message):
    __slots__ = ("segments", "prefill_s")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[SealedSegment]
    prefill_s: float
    def __init__(self, segments: _Optional[_Iterable[_Union[SealedSegment, _Mapping]]] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class KvReport(_message.Message):
    __slots__ = ("pulled_tokens", "cached_tokens", "computed_tokens", "nbytes", "pull_s")
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    pulled_tokens: int
    cached_tokens: int
    computed_tokens: int
    nbytes: int
    pull_s: float
    def __init__(self, pulled_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., nbytes: _Optional[int] = ..., pull_s: _Optional[float] = ...) -> None: ...

class PullReport(_message.Message):
    __slots__ = ("item", "backend", "nbytes", "duration_s", "cached")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    item: int
    backend: str
    nbytes: int
    duration_s: float
    cached: bool
    def __init__(self, item: _Optional[int] = ..., backend: _Optional[str] = ..., nbytes: _Optional[int] = ..., duration_s: _Optional[float] = ..., cached: _Optional[bool] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("pulls", "queue_s", "pull_s", "kv")
    PULLS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    pulls: _containers.RepeatedCompositeFieldContainer[PullReport]
    queue_s: float
    pull_s: float
    kv: KvReport
    def __init__(self, pulls: _Optional[_Iterable[_Union[PullReport, _Mapping]]] = ..., queue_s: _Optional[float] = ..., pull_s: _Optional[float] = ..., kv: _Optional[_Union[KvReport, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "completion_tokens", "prefill_s", "decode_s", "choice", "preemptions", "preempted_s", "cached_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    completion_tokens: int
    prefill_s: float
    decode_s: float
    choice: int
    preemptions: int
    preempted_s: float
    cached_tokens: int
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., completion_tokens: _Optional[int] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., choice: _Optional[int] = ..., preemptions: _Optional[int] = ..., preempted_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class TextEvent(_message.Message):
    __slots__ = ("ready", "chunk", "finished", "kv_transferred")
    READY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    chunk: _common_pb2.TokenChunk
    finished: Finished
    kv_transferred: KvTransferred
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., chunk: _Optional[_Union[_common_pb2.TokenChunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., kv_transferred: _Optional[_Union[KvTransferred, _Mapping]] = ...) -> None: ...

class TextEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TextEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[TextEvent, _Mapping]]] = ...) -> None: ...
