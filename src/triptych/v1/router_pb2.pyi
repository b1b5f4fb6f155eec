from triptych.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpeakerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPEAKER_ROLE_UNSPECIFIED: _ClassVar[SpeakerRole]
    SPEAKER_ROLE_SYSTEM: _ClassVar[SpeakerRole]
    SPEAKER_ROLE_USER: _ClassVar[SpeakerRole]
    SPEAKER_ROLE_ASSISTANT: _ClassVar[SpeakerRole]
    SPEAKER_ROLE_TOOL: _ClassVar[SpeakerRole]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_RUNNING: _ClassVar[Outcome]
    OUTCOME_DONE: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
SPEAKER_ROLE_UNSPECIFIED: SpeakerRole
SPEAKER_ROLE_SYSTEM: SpeakerRole
SPEAKER_ROLE_USER: SpeakerRole
SPEAKER_ROLE_ASSISTANT: SpeakerRole
SPEAKER_ROLE_TOOL: SpeakerRole
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_RUNNING: Outcome
OUTCOME_DONE: Outcome
OUTCOME_FAILED: Outcome
OUTCOME_CANCELLED: Outcome

class MediaPart(_message.Message):
    __slots__ = ("modality", "data")
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    modality: _common_pb2.Modality
    data: bytes
    def __init__(self, modality: _Optional[_Union[_common_pb2.Modality, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text", "media")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    text: str
    media: MediaPart
    def __init__(self, text: _Optional[str] = ..., media: _Optional[_Union[MediaPart, _Mapping]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("call_id", "name", "arguments")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    name: str
    arguments: str
    def __init__(self, call_id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "parts", "tool_calls", "tool_call_id", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: SpeakerRole
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning: str
    def __init__(self, role: _Optional[_Union[SpeakerRole, str]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("required", "name", "one_call")
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ONE_CALL_FIELD_NUMBER: _ClassVar[int]
    required: bool
    name: str
    one_call: bool
    def __init__(self, required: _Optional[bool] = ..., name: _Optional[str] = ..., one_call: _Optional[bool] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("request_id", "model", "messages", "sampling", "tenant_salt", "prompt", "tools", "priority", "tool_choice", "continued", "tenant", "whole", "template_kwargs", "separates_reasoning", "streams_arguments", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    SEPARATES_REASONING_FIELD_NUMBER: _ClassVar[int]
    STREAMS_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    sampling: _common_pb2.SamplingParams
    tenant_salt: bytes
    prompt: str
    tools: str
    priority: int
    tool_choice: ToolChoice
    continued: _containers.RepeatedCompositeFieldContainer[_common_pb2.ContinuedChoice]
    tenant: Tenant
    whole: bool
    template_kwargs: str
    separates_reasoning: bool
    streams_arguments: bool
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., tenant_salt: _Optional[bytes] = ..., prompt: _Optional[str] = ..., tools: _Optional[str] = ..., priority: _Optional[int] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., continued: _Optional[_Iterable[_Union[_common_pb2.ContinuedChoice, _Mapping]]] = ..., tenant: _Optional[_Union[Tenant, _Mapping]] = ..., whole: _Optional[bool] = ..., template_kwargs: _Optional[str] = ..., separates_reasoning: _Optional[bool] = ..., streams_arguments: _Optional[bool] = ..., prompt_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("chat", "return_token_strs")
    CHAT_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_STRS_FIELD_NUMBER: _ClassVar[int]
    chat: ChatRequest
    return_token_strs: bool
    def __init__(self, chat: _Optional[_Union[ChatRequest, _Mapping]] = ..., return_token_strs: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "token_strs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_strs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., token_strs: _Optional[_Iterable[str]] = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("request_id", "model", "media", "keys", "tenant_salt", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    media: _containers.RepeatedCompositeFieldContainer[MediaPart]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    tenant_salt: bytes
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., media: _Optional[_Iterable[_Union[MediaPart, _Mapping]]] = ..., keys: _Optional[_Iterable[bytes]] = ..., tenant_salt: _Optional[bytes] = ..., priority: _Optional[int] = ...) -> None: ...

class ResolvedItem(_message.Message):
    __slots__ = ("ticket", "cached", "grid")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    cached: bool
    grid: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., cached: _Optional[bool] = ..., grid: _Optional[_Iterable[int]] = ...) -> None: ...

class ResolveResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ResolvedItem]
    def __init__(self, items: _Optional[_Iterable[_Union[ResolvedItem, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "image_tokens", "audio_tokens", "video_tokens", "cached_tokens", "reasoning_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    image_tokens: int
    audio_tokens: int
    video_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., image_tokens: _Optional[int] = ..., audio_tokens: _Optional[int] = ..., video_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class ToolCallMade(_message.Message):
    __slots__ = ("call", "index", "choice")
    CALL_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    call: ToolCall
    index: int
    choice: int
    def __init__(self, call: _Optional[_Union[ToolCall, _Mapping]] = ..., index: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class ToolArguments(_message.Message):
    __slots__ = ("text", "index", "choice")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    text: str
    index: int
    choice: int
    def __init__(self, text: _Optional[str] = ..., index: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class Reasoned(_message.Message):
    __slots__ = ("text", "choice")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    text: str
    choice: int
    def __init__(self, text: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class FieldsIgnored(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class ChoiceFinished(_message.Message):
    __slots__ = ("reason", "choice")
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    choice: int
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., choice: _Optional[int] = ...) -> None: ...

class ChatFinished(_message.Message):
    __slots__ = ("usage",)
    USAGE_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class ChatEvent(_message.Message):
    __slots__ = ("chunk", "choice_finished", "finished", "tool_call", "reasoned", "ignored", "arguments")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    REASONED_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    chunk: _common_pb2.TokenChunk
    choice_finished: ChoiceFinished
    finished: ChatFinished
    tool_call: ToolCallMade
    reasoned: Reasoned
    ignored: FieldsIgnored
    arguments: ToolArguments
    def __init__(self, chunk: _Optional[_Union[_common_pb2.TokenChunk, _Mapping]] = ..., choice_finished: _Optional[_Union[ChoiceFinished, _Mapping]] = ..., finished: _Optional[_Union[ChatFinished, _Mapping]] = ..., tool_call: _Optional[_Union[ToolCallMade, _Mapping]] = ..., reasoned: _Optional[_Union[Reasoned, _Mapping]] = ..., ignored: _Optional[_Union[FieldsIgnored, _Mapping]] = ..., arguments: _Optional[_Union[ToolArguments, _Mapping]] = ...) -> None: ...

class ChatEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[ChatEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[ChatEvent, _Mapping]]] = ...) -> None: ...

class ModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelsResponse(_message.Message):
    __slots__ = ("models", "continues")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelInfo]
    continues: bool
    def __init__(self, models: _Optional[_Iterable[_Union[_common_pb2.ModelInfo, _Mapping]]] = ..., continues: _Optional[bool] = ...) -> None: ...

class TimelineRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ItemTimeline(_message.Message):
    __slots__ = ("item", "modality", "width", "height", "tokens", "encoder", "encode_attempts", "encoder_cached", "queue_s", "encode_s", "pull_backend", "pull_bytes", "pull_s", "text_cached", "shard", "hedges", "hedge_won")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    ENCODE_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_CACHED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    PULL_BACKEND_FIELD_NUMBER: _ClassVar[int]
    PULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_CACHED_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    HEDGES_FIELD_NUMBER: _ClassVar[int]
    HEDGE_WON_FIELD_NUMBER: _ClassVar[int]
    item: int
    modality: str
    width: int
    height: int
    tokens: int
    encoder: str
    encode_attempts: int
    encoder_cached: bool
    queue_s: float
    encode_s: float
    pull_backend: str
    pull_bytes: int
    pull_s: float
    text_cached: bool
    shard: str
    hedges: int
    hedge_won: bool
    def __init__(self, item: _Optional[int] = ..., modality: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., tokens: _Optional[int] = ..., encoder: _Optional[str] = ..., encode_attempts: _Optional[int] = ..., encoder_cached: _Optional[bool] = ..., queue_s: _Optional[float] = ..., encode_s: _Optional[float] = ..., pull_backend: _Optional[str] = ..., pull_bytes: _Optional[int] = ..., pull_s: _Optional[float] = ..., text_cached: _Optional[bool] = ..., shard: _Optional[str] = ..., hedges: _Optional[int] = ..., hedge_won: _Optional[bool] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("request_id", "model", "outcome", "items", "text_instance", "text_attempts", "prompt_tokens", "completion_tokens", "prepare_s", "encode_s", "queue_s", "pull_s", "prefill_s", "decode_s", "ttft_s", "total_s", "error", "continuations", "interrupted_s", "continued_tokens", "preemptions", "preempted_s", "early_tokens", "prefill_instance", "kv_transfer_s", "kv_pulled_tokens", "kv_cached_tokens", "kv_computed_tokens", "kv_pull_bytes", "prefix_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TEXT_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_S_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_S_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_S_FIELD_NUMBER: _ClassVar[int]
    EARLY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    KV_PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_PULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    outcome: Outcome
    items: _containers.RepeatedCompositeFieldContainer[ItemTimeline]
    text_instance: str
    text_attempts: int
    prompt_tokens: int
    completion_tokens: int
    prepare_s: float
    encode_s: float
    queue_s: float
    pull_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float
    total_s: float
    error: str
    continuations: int
    interrupted_s: float
    continued_tokens: int
    preemptions: int
    preempted_s: float
    early_tokens: int
    prefill_instance: str
    kv_transfer_s: float
    kv_pulled_tokens: int
    kv_cached_tokens: int
    kv_computed_tokens: int
    kv_pull_bytes: int
    prefix_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., items: _Optional[_Iterable[_Union[ItemTimeline, _Mapping]]] = ..., text_instance: _Optional[str] = ..., text_attempts: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., prepare_s: _Optional[float] = ..., encode_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., pull_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., total_s: _Optional[float] = ..., error: _Optional[str] = ..., continuations: _Optional[int] = ..., interrupted_s: _Optional[float] = ..., continued_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., preempted_s: _Optional[float] = ..., early_tokens: _Optional[int] = ..., prefill_instance: _Optional[str] = ..., kv_transfer_s: _Optional[float] = ..., kv_pulled_tokens: _Optional[int] = ..., kv_cached_tokens: _Optional[int] = ..., kv_computed_tokens: _Optional[int] = ..., kv_pull_bytes: _Optional[int] = ..., prefix_tokens: _Optional[int] = ...) -> None: ...

class ReadinessRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadinessResponse(_message.Message):
    __slots__ = ("ready", "missing", "instances")
    READY_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    missing: _containers.RepeatedScalarFieldContainer[str]
    instances: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ready: _Optional[bool] = ..., missing: _Optional[_Iterable[str]] = ..., instances: _Optional[_Iterable[str]] = ...) -> None: ...
