from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Modality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODALITY_UNSPECIFIED: _ClassVar[Modality]
    MODALITY_IMAGE: _ClassVar[Modality]
    MODALITY_VIDEO: _ClassVar[Modality]
    MODALITY_AUDIO: _ClassVar[Modality]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_F32: _ClassVar[DType]
    DTYPE_F16: _ClassVar[DType]
    DTYPE_BF16: _ClassVar[DType]
    DTYPE_I64: _ClassVar[DType]
    DTYPE_I32: _ClassVar[DType]
    DTYPE_U8: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]

class Grammar(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_UNSPECIFIED: _ClassVar[Grammar]
    GRAMMAR_JSON_OBJECT: _ClassVar[Grammar]
    GRAMMAR_JSON_SCHEMA: _ClassVar[Grammar]
    GRAMMAR_LARK: _ClassVar[Grammar]
MODALITY_UNSPECIFIED: Modality
MODALITY_IMAGE: Modality
MODALITY_VIDEO: Modality
MODALITY_AUDIO: Modality
DTYPE_UNSPECIFIED: DType
DTYPE_F32: DType
DTYPE_F16: DType
DTYPE_BF16: DType
DTYPE_I64: DType
DTYPE_I32: DType
DTYPE_U8: DType
DTYPE_BOOL: DType
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
GRAMMAR_UNSPECIFIED: Grammar
GRAMMAR_JSON_OBJECT: Grammar
GRAMMAR_JSON_SCHEMA: Grammar
GRAMMAR_LARK: Grammar

class MediaInfo(_message.Message):
    __slots__ = ("modality", "format", "width", "height", "nbytes", "digest", "frames", "duration_s", "samples", "sample_rate_hz", "rotation_deg", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    ROTATION_DEG_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    modality: Modality
    format: str
    width: int
    height: int
    nbytes: int
    digest: bytes
    frames: int
    duration_s: float
    samples: int
    sample_rate_hz: int
    rotation_deg: int
    options: _containers.ScalarMap[str, str]
    def __init__(self, modality: _Optional[_Union[Modality, str]] = ..., format: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., nbytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., frames: _Optional[int] = ..., duration_s: _Optional[float] = ..., samples: _Optional[int] = ..., sample_rate_hz: _Optional[int] = ..., rotation_deg: _Optional[int] = ..., options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("first", "count", "of")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    of: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ..., of: _Optional[int] = ...) -> None: ...

class RelativeQueuePosition(_message.Message):
    __slots__ = ("due_in_s", "lost_in_s", "aged_in_s", "behind_s")
    DUE_IN_S_FIELD_NUMBER: _ClassVar[int]
    LOST_IN_S_FIELD_NUMBER: _ClassVar[int]
    AGED_IN_S_FIELD_NUMBER: _ClassVar[int]
    BEHIND_S_FIELD_NUMBER: _ClassVar[int]
    due_in_s: float
    lost_in_s: float
    aged_in_s: float
    behind_s: float
    def __init__(self, due_in_s: _Optional[float] = ..., lost_in_s: _Optional[float] = ..., aged_in_s: _Optional[float] = ..., behind_s: _Optional[float] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("key", "holder", "epoch", "offset", "payload_nbytes", "generation", "checksum", "tensors", "tokens", "lease_id", "lease_s", "address")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_NBYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    holder: str
    epoch: int
    offset: int
    payload_nbytes: int
    generation: int
    checksum: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    tokens: int
    lease_id: bytes
    lease_s: float
    address: str
    def __init__(self, key: _Optional[bytes] = ..., holder: _Optional[str] = ..., epoch: _Optional[int] = ..., offset: _Optional[int] = ..., payload_nbytes: _Optional[int] = ..., generation: _Optional[int] = ..., checksum: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., tokens: _Optional[int] = ..., lease_id: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., address: _Optional[str] = ...) -> None: ...

class ResponseFormat(_message.Message):
    __slots__ = ("grammar", "schema")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    grammar: Grammar
    schema: str
    def __init__(self, grammar: _Optional[_Union[Grammar, str]] = ..., schema: _Optional[str] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop", "ignore_eos", "min_p", "n", "min_tokens", "stop_token_ids", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "response_format", "special_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    min_p: float
    n: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    logprobs: int
    response_format: ResponseFormat
    special_tokens: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., min_p: _Optional[float] = ..., n: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., logprobs: _Optional[int] = ..., response_format: _Optional[_Union[ResponseFormat, _Mapping]] = ..., special_tokens: _Optional[bool] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_id", "revision", "dtype", "hidden_size", "context_length", "parent")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    revision: str
    dtype: DType
    hidden_size: int
    context_length: int
    parent: str
    def __init__(self, model_id: _Optional[str] = ..., revision: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., hidden_size: _Optional[int] = ..., context_length: _Optional[int] = ..., parent: _Optional[str] = ...) -> None: ...

class LoadedLora(_message.Message):
    __slots__ = ("name", "digest", "rank", "nbytes", "encodes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODES_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    rank: int
    nbytes: int
    encodes: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., nbytes: _Optional[int] = ..., encodes: _Optional[bool] = ...) -> None: ...

class LoadLoraRequest(_message.Message):
    __slots__ = ("name", "directory", "parent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    directory: str
    parent: str
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ..., parent: _Optional[str] = ...) -> None: ...

class LoadLoraResponse(_message.Message):
    __slots__ = ("lora",)
    LORA_FIELD_NUMBER: _ClassVar[int]
    lora: LoadedLora
    def __init__(self, lora: _Optional[_Union[LoadedLora, _Mapping]] = ...) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("token_id", "token", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    token: bytes
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., token: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: Alternative
    top: _containers.RepeatedCompositeFieldContainer[Alternative]
    def __init__(self, chosen: _Optional[_Union[Alternative, _Mapping]] = ..., top: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("token_ids", "text", "choice", "logprobs", "waited_s")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    choice: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    waited_s: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., choice: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., waited_s: _Optional[float] = ...) -> None: ...

class ContinuedChoice(_message.Message):
    __slots__ = ("choice", "token_ids")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
