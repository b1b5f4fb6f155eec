from triptych.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("request_id", "item", "model", "media", "info", "tokens", "tenant_salt", "lease_s", "reader_lease", "router_lease", "shard", "priority", "position")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    READER_LEASE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_LEASE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    item: int
    model: str
    media: bytes
    info: _common_pb2.MediaInfo
    tokens: int
    tenant_salt: bytes
    lease_s: float
    reader_lease: bytes
    router_lease: bytes
    shard: _common_pb2.Shard
    priority: int
    position: _common_pb2.RelativeQueuePosition
    def __init__(self, request_id: _Optional[str] = ..., item: _Optional[int] = ..., model: _Optional[str] = ..., media: _Optional[bytes] = ..., info: _Optional[_Union[_common_pb2.MediaInfo, _Mapping]] = ..., tokens: _Optional[int] = ..., tenant_salt: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., reader_lease: _Optional[bytes] = ..., router_lease: _Optional[bytes] = ..., shard: _Optional[_Union[_common_pb2.Shard, _Mapping]] = ..., priority: _Optional[int] = ..., position: _Optional[_Union[_common_pb2.RelativeQueuePosition, _Mapping]] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("ticket", "router_lease", "cached", "queue_s", "encode_s")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ROUTER_LEASE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    router_lease: bytes
    cached: bool
    queue_s: float
    encode_s: float
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., router_lease: _Optional[bytes] = ..., cached: _Optional[bool] = ..., queue_s: _Optional[float] = ..., encode_s: _Optional[float] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("key", "generation", "lease_s", "lease_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    generation: int
    lease_s: float
    lease_id: bytes
    def __init__(self, key: _Optional[bytes] = ..., generation: _Optional[int] = ..., lease_s: _Optional[float] = ..., lease_id: _Optional[bytes] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lease_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
