"""The JSON type of every answer. Answers are type-checked against these, and OpenAPI schemas are derived from them."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from triptych.domain.generation import FinishReason

Count = Annotated[int, Field(ge=0)]
Finish = Annotated[str, Field(json_schema_extra={"enum": [reason.value for reason in FinishReason]})]
ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"
]


class ErrorDetail(TypedDict):
    message: str
    type: ErrorType
    param: str | None
    code: str


class Error(TypedDict):
    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    cached_tokens: Count
    """Found in a prefix cache."""
    image_tokens: Count
    audio_tokens: Count
    video_tokens: Count


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: Count


class Usage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[Count]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    """The same as reasoning."""
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The first one of a call has its id and name; others continue its arguments."""

    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class CompletionChoice(TypedDict):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    """Null in every chunk of a stream except a choice's last."""


class Completion(TypedDict):
    """A complete answer, with ``usage``, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class Tokens(TypedDict):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    parent: str | None
    max_model_len: Count


class Unloaded(TypedDict):
    id: str
    object: Literal["model"]
    deleted: Literal[True]


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    status: Literal["ok"]


class Version(TypedDict):
    version: str


class Load(TypedDict):
    server_load: Count
