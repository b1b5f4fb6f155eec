"""The bodies that the gateway takes, field by field; ``/openapi.json`` is made from these classes.

Unknown fields pass unseen, as clients send ever new ones. Fields that are known and would change the answer, but are
not supported, are refused by name unless they ask for nothing (``tools: []``, ``echo: false``).
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from triptych.policy.admission import MAX_CHOICES, MAX_PRIORITY, MIN_PRIORITY

from .openai_fields import INT31, INT64, Api, Unless, shown, type_tag
from .openai_parts import ApiContent
from .openai_tools import MAX_CALL_ID_CHARS, ApiToolCalls, ApiToolChoice, ApiTools

MAX_STOP_STRINGS = 4
"""The OpenAI API's."""
MAX_NAMED_TOKENS = 4096
"""Of stop_token_ids and of logit_bias: what is parsed is bounded in number. What a request may have, the router's settings
say (``max_stop_token_ids``, ``max_logit_bias``)."""
MAX_TOP_LOGPROBS = 20
MAX_SALT_CHARS = 256
MAX_MESSAGES = 4096


def _known_role(value: object) -> object:
    """What is no assistant's and no tool's message is held to be one that is spoken: name all roles where it is not."""
    roles = ("system", "developer", "user", "assistant", "tool")
    if value not in roles:
        raise PydanticCustomError(
            "part_type", "must be one of {roles}, not {got}", {"roles": ", ".join(roles), "got": shown(value)}
        )
    return value


class ApiSpokenMessage(Api):
    role: Annotated[Literal["system", "developer", "user"], BeforeValidator(_known_role)]
    content: ApiContent


class ApiAssistantMessage(Api):
    role: Literal["assistant"]
    content: ApiContent | None = None
    """Needed unless there are tool_calls."""
    tool_calls: ApiToolCalls | None = None
    """Taken where the model's chat template has a place for them, else refused."""
    function_call: Annotated[object, Unless(None)] = None
    audio: Annotated[object, Unless(None)] = None


class ApiToolMessage(Api):
    """What came of a call. Taken where the model's chat template has a place for it, else refused."""

    role: Literal["tool"]
    content: ApiContent
    tool_call_id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)


def _role_tag(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"#{role}" if role in ("assistant", "tool") else "#spoken"


def _check_message(value: object) -> object:
    """One clear line about what is no message or has no role that is known."""
    if not isinstance(value, dict):
        raise PydanticCustomError("part_type", "must be an object, not {got}", {"got": shown(value)})
    return value


ApiMessage = Annotated[
    Annotated[ApiSpokenMessage, Tag("#spoken")]
    | Annotated[ApiAssistantMessage, Tag("#assistant")]
    | Annotated[ApiToolMessage, Tag("#tool")],
    Discriminator(_role_tag),
    BeforeValidator(_check_message),
]
# Named, as FailFast cannot be hashed and so cannot be part of a union.
ApiMessages = TypeAliasType(
    "ApiMessages", Annotated[list[ApiMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
)


class StreamOptions(Api):
    include_usage: bool | None = None
    """One more chunk before the end tells the usage."""


class ApiJsonSchema(Api):
    name: str = Field(default="", max_length=256)
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """The JSON Schema that the answer is held to."""


class ResponseFormatText(Api):
    type: Literal["text"]


class ResponseFormatObject(Api):
    type: Literal["json_object"]


class ResponseFormatSchema(Api):
    type: Literal["json_schema"]
    json_schema: ApiJsonSchema


def _check_format_type(value: object) -> object:
    """One clear line about the type, rather than one about each class of the union."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        message = "must be an object of type 'text', 'json_object' or 'json_schema', not {got}"
        raise PydanticCustomError("part_type", message, {"got": shown(value if kind is None else kind)})
    return value


ApiResponseFormat = Annotated[
    Annotated[ResponseFormatText, Tag("#text")]
    | Annotated[ResponseFormatObject, Tag("#json_object")]
    | Annotated[ResponseFormatSchema, Tag("#json_schema")],
    Discriminator(type_tag),
    BeforeValidator(_check_format_type),
]


def _as_list(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _check_bias_keys(bias: dict[str, float]) -> dict[str, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < INT31):
            raise PydanticCustomError("part_type", "the keys must be token ids, not {got}", {"got": shown(key)})
    return bias


TokenIds = TypeAliasType(
    "TokenIds",
    Annotated[list[Annotated[int, Field(ge=0, lt=INT31)]], FailFast(), Field(max_length=MAX_NAMED_TOKENS)],
)


class Generation(Api):
    """What chat and plain completions have in common. What is no field of OpenAI's is named as elsewhere in the field."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1, lt=INT31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=INT31)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Keep tokens at least this fraction as likely as the likeliest."""
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    """Answers to the same prompt."""
    seed: int | None = Field(default=None, ge=0, lt=INT64)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        FailFast(),
        Field(max_length=MAX_STOP_STRINGS),
        BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
    ] = Field(default_factory=list)
    stop_token_ids: TokenIds | None = None
    min_tokens: int | None = Field(default=None, ge=0, lt=INT31)
    ignore_eos: bool | None = None
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_NAMED_TOKENS),
            AfterValidator(_check_bias_keys),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Taken and without effect."""
    priority: int | None = Field(default=None, ge=MIN_PRIORITY, le=MAX_PRIORITY)
    """Where requests wait, lower ones go first; those of equal priority by the time they have left (x-request-timeout).
    Left out, it is 0."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_CHARS)
    """Embeddings are shared only among requests with the same salt."""


class ChatCompletionRequest(Generation):
    """``POST /v1/chat/completions``."""

    messages: ApiMessages
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=INT31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Needs ``logprobs``."""
    response_format: ApiResponseFormat | None = None
    tools: ApiTools | None = None
    """Shown to the model if its chat template has a place for them, else refused."""
    tool_choice: ApiToolChoice | None = None
    """Whether tools are kept from the model (none), called as it likes (auto, the default), called in any case
    (required), or one of them is called by name."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may make several calls; it may if this is left out."""
    functions: Annotated[object, Unless(None, [])] = None
    function_call: Annotated[object, Unless(None, "none", "auto")] = None
    modalities: Annotated[object, Unless(None, [], ["text"])] = None
    audio: Annotated[object, Unless(None)] = None
    prediction: Annotated[object, Unless(None)] = None
    web_search_options: Annotated[object, Unless(None)] = None


def _one_prompt(value: object) -> object:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    if not isinstance(value, str):
        message = "must be a string or an array of one string, not {got}"
        raise PydanticCustomError("part_type", message, {"got": shown(value)})
    return value


Prompt = Annotated[
    str,
    BeforeValidator(_one_prompt, json_schema_input_type=str | Annotated[list[str], Field(min_length=1, max_length=1)]),
]


class CompletionRequest(Generation):
    """``POST /v1/completions``: a raw prompt, without the chat template."""

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Annotated[object, Unless(None, False)] = None
    suffix: Annotated[object, Unless(None, "")] = None
    best_of: Annotated[object, Unless(None, 1)] = None


class TokenizeRequest(Api):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    """Left out, it is the model that is served."""
    prompt: str | None = None
    messages: ApiMessages | None = None
    return_token_strs: bool | None = None
    """Whether the answer's token_strs are told; they are null otherwise."""
