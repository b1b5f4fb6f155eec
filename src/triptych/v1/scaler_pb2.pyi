from triptych.v1 import instance_pb2 as _instance_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_ORDERED: _ClassVar[Phase]
    PHASE_STARTING: _ClassVar[Phase]
    PHASE_RUNNING: _ClassVar[Phase]
    PHASE_STOPPING: _ClassVar[Phase]
    PHASE_FAILED: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_ORDERED: Phase
PHASE_STARTING: Phase
PHASE_RUNNING: Phase
PHASE_STOPPING: Phase
PHASE_FAILED: Phase

class PoolName(_message.Message):
    __slots__ = ("model", "role", "tier")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _instance_pb2.Role
    tier: str
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_instance_pb2.Role, str]] = ..., tier: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "size", "token")
    POOL_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool: PoolName
    size: int
    token: int
    def __init__(self, pool: _Optional[_Union[PoolName, _Mapping]] = ..., size: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("pool", "instance", "token")
    POOL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool: PoolName
    instance: str
    token: int
    def __init__(self, pool: _Optional[_Union[PoolName, _Mapping]] = ..., instance: _Optional[str] = ..., token: _Optional[int] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetDegreeRequest(_message.Message):
    __slots__ = ("pool", "degree", "token")
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEGREE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool: PoolName
    degree: int
    token: int
    def __init__(self, pool: _Optional[_Union[PoolName, _Mapping]] = ..., degree: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class SetDegreeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaledInstance(_message.Message):
    __slots__ = ("name", "phase", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    phase: Phase
    reason: str
    def __init__(self, name: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ScaledPool(_message.Message):
    __slots__ = ("name", "wanted", "instances", "fault")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    name: PoolName
    wanted: int
    instances: _containers.RepeatedCompositeFieldContainer[ScaledInstance]
    fault: str
    def __init__(self, name: _Optional[_Union[PoolName, _Mapping]] = ..., wanted: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[ScaledInstance, _Mapping]]] = ..., fault: _Optional[str] = ...) -> None: ...

class ScaledPools(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[ScaledPool]
    def __init__(self, pools: _Optional[_Iterable[_Union[ScaledPool, _Mapping]]] = ...) -> None: ...
