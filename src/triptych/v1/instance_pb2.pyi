from triptych.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_UNSPECIFIED: _ClassVar[Stage]
    STAGE_ENCODE: _ClassVar[Stage]
    STAGE_PREFILL: _ClassVar[Stage]
    STAGE_DECODE: _ClassVar[Stage]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_E: _ClassVar[Role]
    ROLE_P: _ClassVar[Role]
    ROLE_D: _ClassVar[Role]
    ROLE_PD: _ClassVar[Role]
    ROLE_EP: _ClassVar[Role]
    ROLE_ED: _ClassVar[Role]
    ROLE_EPD: _ClassVar[Role]

class ModelPart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_PART_UNSPECIFIED: _ClassVar[ModelPart]
    MODEL_PART_ENCODER: _ClassVar[ModelPart]
    MODEL_PART_DECODER: _ClassVar[ModelPart]
STAGE_UNSPECIFIED: Stage
STAGE_ENCODE: Stage
STAGE_PREFILL: Stage
STAGE_DECODE: Stage
ROLE_UNSPECIFIED: Role
ROLE_E: Role
ROLE_P: Role
ROLE_D: Role
ROLE_PD: Role
ROLE_EP: Role
ROLE_ED: Role
ROLE_EPD: Role
MODEL_PART_UNSPECIFIED: ModelPart
MODEL_PART_ENCODER: ModelPart
MODEL_PART_DECODER: ModelPart

class TransportOffer(_message.Message):
    __slots__ = ("backend", "host", "metadata")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    backend: str
    host: str
    metadata: bytes
    def __init__(self, backend: _Optional[str] = ..., host: _Optional[str] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PartIdentity(_message.Message):
    __slots__ = ("part", "digest", "stages", "hardware", "dtype", "tensor_parallel", "software", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PART_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    part: ModelPart
    digest: str
    stages: _containers.RepeatedScalarFieldContainer[Stage]
    hardware: str
    dtype: _common_pb2.DType
    tensor_parallel: int
    software: str
    options: _containers.ScalarMap[str, str]
    def __init__(self, part: _Optional[_Union[ModelPart, str]] = ..., digest: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[Stage, str]]] = ..., hardware: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., tensor_parallel: _Optional[int] = ..., software: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ServedPart(_message.Message):
    __slots__ = ("identity", "max_batch", "token_budget", "prepare_cores")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    PREPARE_CORES_FIELD_NUMBER: _ClassVar[int]
    identity: PartIdentity
    max_batch: int
    token_budget: int
    prepare_cores: int
    def __init__(self, identity: _Optional[_Union[PartIdentity, _Mapping]] = ..., max_batch: _Optional[int] = ..., token_budget: _Optional[int] = ..., prepare_cores: _Optional[int] = ...) -> None: ...

class InstanceInfo(_message.Message):
    __slots__ = ("instance_id", "epoch", "role", "model", "arena_bytes", "offers", "encoder_version", "max_items", "kv_tokens", "parts", "continues", "prefills_early", "kv_kind", "transfers_kv", "switchable", "kv_segment_tokens", "kv_position_bytes", "kv_block_tokens")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_EARLY_FIELD_NUMBER: _ClassVar[int]
    KV_KIND_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_KV_FIELD_NUMBER: _ClassVar[int]
    SWITCHABLE_FIELD_NUMBER: _ClassVar[int]
    KV_SEGMENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_POSITION_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    role: Role
    model: _common_pb2.ModelInfo
    arena_bytes: int
    offers: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    encoder_version: str
    max_items: int
    kv_tokens: int
    parts: _containers.RepeatedCompositeFieldContainer[ServedPart]
    continues: bool
    prefills_early: bool
    kv_kind: str
    transfers_kv: bool
    switchable: Role
    kv_segment_tokens: int
    kv_position_bytes: int
    kv_block_tokens: int
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., arena_bytes: _Optional[int] = ..., offers: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., encoder_version: _Optional[str] = ..., max_items: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[ServedPart, _Mapping]]] = ..., continues: _Optional[bool] = ..., prefills_early: _Optional[bool] = ..., kv_kind: _Optional[str] = ..., transfers_kv: _Optional[bool] = ..., switchable: _Optional[_Union[Role, str]] = ..., kv_segment_tokens: _Optional[int] = ..., kv_position_bytes: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageLoad(_message.Message):
    __slots__ = ("stage", "pending_tokens", "pending", "leased_bytes", "free_tokens", "served")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    stage: Stage
    pending_tokens: int
    pending: int
    leased_bytes: int
    free_tokens: int
    served: int
    def __init__(self, stage: _Optional[_Union[Stage, str]] = ..., pending_tokens: _Optional[int] = ..., pending: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., free_tokens: _Optional[int] = ..., served: _Optional[int] = ...) -> None: ...

class ClosedStage(_message.Message):
    __slots__ = ("stage", "opens_s", "fault")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OPENS_S_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    stage: Stage
    opens_s: float
    fault: str
    def __init__(self, stage: _Optional[_Union[Stage, str]] = ..., opens_s: _Optional[float] = ..., fault: _Optional[str] = ...) -> None: ...

class EmbeddingHints(_message.Message):
    __slots__ = ("sequence", "held", "encoding", "dropped")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    held: _containers.RepeatedScalarFieldContainer[bytes]
    encoding: _containers.RepeatedScalarFieldContainer[bytes]
    dropped: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sequence: _Optional[int] = ..., held: _Optional[_Iterable[bytes]] = ..., encoding: _Optional[_Iterable[bytes]] = ..., dropped: _Optional[_Iterable[bytes]] = ...) -> None: ...

class InstanceLimits(_message.Message):
    __slots__ = ("max_batch_items", "max_sequences", "token_budget")
    MAX_BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    max_batch_items: int
    max_sequences: int
    token_budget: int
    def __init__(self, max_batch_items: _Optional[int] = ..., max_sequences: _Optional[int] = ..., token_budget: _Optional[int] = ...) -> None: ...

class LimitsReport(_message.Message):
    __slots__ = ("limits", "version", "by_hand", "fault")
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BY_HAND_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    limits: InstanceLimits
    version: int
    by_hand: bool
    fault: str
    def __init__(self, limits: _Optional[_Union[InstanceLimits, _Mapping]] = ..., version: _Optional[int] = ..., by_hand: _Optional[bool] = ..., fault: _Optional[str] = ...) -> None: ...

class InstanceLoad(_message.Message):
    __slots__ = ("stages", "draining", "hints", "stages_version", "closed", "limits", "loras")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    STAGES_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[StageLoad]
    draining: bool
    hints: EmbeddingHints
    stages_version: int
    closed: _containers.RepeatedCompositeFieldContainer[ClosedStage]
    limits: LimitsReport
    loras: _containers.RepeatedCompositeFieldContainer[_common_pb2.LoadedLora]
    def __init__(self, stages: _Optional[_Iterable[_Union[StageLoad, _Mapping]]] = ..., draining: _Optional[bool] = ..., hints: _Optional[_Union[EmbeddingHints, _Mapping]] = ..., stages_version: _Optional[int] = ..., closed: _Optional[_Iterable[_Union[ClosedStage, _Mapping]]] = ..., limits: _Optional[_Union[LimitsReport, _Mapping]] = ..., loras: _Optional[_Iterable[_Union[_common_pb2.LoadedLora, _Mapping]]] = ...) -> None: ...
