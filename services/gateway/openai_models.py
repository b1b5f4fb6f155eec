"""The request bodies of the gateway, field by field. ``/openapi.json`` is derived from these classes.

Other fields are those of ``request_fields``.
"""

from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    PlainValidator,
    Tag,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from triptych.domain.bounds import MAX_INT31, Between, Bound, Many, Size
from triptych.domain.chat import PRIORITY
from triptych.domain.lora import MAX_NAME
from triptych.domain.sampling import BIAS, PARAMETERS, Parameter

from .openai_fields import Api, Keeping, shown, type_tag
from .openai_parts import ApiContent
from .openai_tools import MAX_CALL_ID_CHARS, ApiToolCalls, ApiToolChoice, ApiTools
from .request_fields import On, refused_properties

MAX_SALT_CHARS = 256
MAX_MESSAGES = 4096
MAX_PROMPTS = 64


def _known_role(value: object) -> object:
    """Name all roles in the error: the union treats every unknown role as a spoken message."""
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
    """Required unless there are tool_calls."""
    tool_calls: ApiToolCalls | None = None
    """Accepted if the model's chat template supports tool calls, else refused."""
    reasoning: str | None = None
    """What the model thought before it answered: shown to it if its chat template does so."""
    reasoning_content: str | None = None
    """The same by its other name."""


class ApiToolMessage(Api):
    """The result of a tool call. Accepted if the model's chat template supports it, else refused."""

    role: Literal["tool"]
    content: ApiContent
    tool_call_id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)


def _role_tag(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"#{role}" if role in ("assistant", "tool") else "#spoken"


def _check_message(value: object) -> object:
    """Raise one clear error for a value that is not a message, instead of one per class of the union."""
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
# A named alias: FailFast is not hashable and so cannot be part of a union.
ApiMessages = TypeAliasType(
    "ApiMessages", Annotated[list[ApiMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
)


class StreamOptions(Api):
    include_usage: bool | None = None
    """Send one more chunk with the usage at the end."""


class ApiJsonSchema(Api):
    name: str | None = Field(default=None, max_length=256)
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """The JSON Schema that the answer must match."""


class ResponseFormatText(Api):
    type: Literal["text"]


class ResponseFormatObject(Api):
    type: Literal["json_object"]


class ResponseFormatSchema(Api):
    type: Literal["json_schema"]
    json_schema: ApiJsonSchema


def _check_format_type(value: object) -> object:
    """Raise one clear error about the type, instead of one per class of the union."""
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


def _text_or(other: str) -> Discriminator:
    """Tells a string apart, so that errors name the field alone."""
    return Discriminator(lambda value: "#text" if isinstance(value, str) else other)


ApiSchema = Annotated[Annotated[str, Tag("#text")] | Annotated[dict[str, Any], Tag("#object")], _text_or("#object")]
ReasoningEffort = Annotated[
    Annotated[str, Field(max_length=32), Tag("#text")] | Annotated[float, Tag("#number")], _text_or("#number")
]


class ApiStructuredOutputs(Api):
    json_schema: ApiSchema | None = Field(default=None, alias="json")
    """The JSON Schema that the answer must match, also as text."""
    json_object: bool | None = None


ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]


def _as_list(value: object) -> object:
    if value is None or value == "":  # forms send an empty field so
        return []
    return [value] if isinstance(value, str) else value


def _check_bias_keys(bias: dict[str, float]) -> dict[str, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_INT31):
            raise PydanticCustomError("part_type", "the keys must be token ids, not {got}", {"got": shown(key)})
    return bias


def _limits(bound: Bound | None) -> FieldInfo:
    """A bound as a pydantic field, which ``/openapi.json`` shows too."""
    match bound:
        case Between(low=low, high=high, above=above):
            return cast(FieldInfo, Field(gt=low, le=high) if above else Field(ge=low, le=high))
        case Many(high=high):
            return cast(FieldInfo, Field(max_length=high))
        case Size(low=low, high=high):
            return cast(FieldInfo, Field(min_length=low, max_length=high))
    return cast(FieldInfo, Field())


def _field(row: Parameter) -> Any:
    """The type of a sampling parameter in a body; null or left out means the default."""
    limits = _limits(row.bound)
    if row.kind in (int, float, bool, int | None):
        kind: Any = int if row.kind == int | None else row.kind
        return Annotated[kind, limits] | None
    if row.kind == tuple[tuple[int, float], ...]:
        biases: Any = dict[str, Annotated[float, _limits(BIAS.second)]]
        return Annotated[biases, limits, AfterValidator(_check_bias_keys)] | None
    each: Any = Annotated[get_args(row.kind)[0], _limits(cast(Many, row.bound).each)]
    if row.kind == tuple[str, ...]:
        one_too = BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None)
        return Annotated[list[each], FailFast(), limits, one_too]
    # A named alias: FailFast is not hashable and so cannot be part of a union.
    listed: Any = TypeAliasType("TokenIds", Annotated[list[each], FailFast(), limits])
    return listed | None


TopLogprobs = Annotated[int, _limits(PARAMETERS["logprobs"].bound)]
_OWN_FORM = frozenset({"logprobs", "response_format", "special_tokens"})
"""Parameters whose fields differ from their rows, or between chat and plain completions."""

if TYPE_CHECKING:

    class SamplingFields(Api):
        """Fields of sampling, one per row of ``domain.sampling``, except ``_OWN_FORM``."""

        max_tokens: int | None
        n: int | None

    class ResponsesSampling(Keeping):
        """Those that Responses have."""

        temperature: float | None
        top_p: float | None

    class MessagesSampling(Keeping):
        """Those that Messages have."""
else:

    def _sampling_model(name: str, base: type[Api], names: AbstractSet[str]) -> type[Api]:
        rows = [(each, PARAMETERS[each]) for each in PARAMETERS if each in names - _OWN_FORM]
        fields = {each: (_field(row), Field(default=None, description=row.about or None)) for each, row in rows}
        return create_model(name, __base__=base, **fields)

    SamplingFields = _sampling_model("SamplingFields", Api, PARAMETERS.keys())
    ResponsesSampling = _sampling_model(
        "ResponsesSampling", Keeping, PARAMETERS.keys() - {"n", "max_tokens", "min_tokens"}
    )
    MessagesSampling = _sampling_model("MessagesSampling", Keeping, {"temperature", "top_p", "top_k"})


def add_properties(route: On, schema: dict[str, Any]) -> None:
    schema["properties"] |= refused_properties(route)


class Generation(SamplingFields):
    """Fields shared by chat and plain completions. Extensions to OpenAI's API use the names common among other servers."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text. The default is true."""
    response_format: ApiResponseFormat | None = None
    structured_outputs: ApiStructuredOutputs | None = None
    """As response_format, in vLLM's form."""
    guided_json: ApiSchema | None = None
    """As structured_outputs.json."""
    service_tier: ServiceTier | None = None
    """A priority, if none is given: flex goes after others, priority before them if the key allows it."""
    priority: int | None = Field(default=None, ge=PRIORITY.low, le=PRIORITY.high)
    """Lower values are served first; equal ones by the time they have left (x-request-timeout). The default is 0."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_CHARS)
    """Embeddings are shared only between requests with the same salt."""


class ChatCompletionRequest(Generation):
    """``POST /v1/chat/completions``."""

    model_config = ConfigDict(json_schema_extra=partial(add_properties, On.CHAT))

    messages: ApiMessages
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT31)
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    """Needs ``logprobs``."""
    reasoning_effort: ReasoningEffort | None = None
    """A variable of the chat template, if it has one of this name."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
    include_reasoning: bool | None = None
    """Whether the answer has its reasoning. The default is true."""
    separate_reasoning: bool | None = None
    """Whether reasoning is apart from the content. The default is true."""
    tools: ApiTools | None = None
    """Shown to the model if its chat template supports tools, else refused."""
    tool_choice: ApiToolChoice | None = None
    """none: tools are hidden from the model; auto (the default): it may call them; required: it must call one; or the
    name of the one to call."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may contain several calls. The default is true."""


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    given = value if isinstance(value, list) and _tokens(value) is None else [value]
    prompts = [prompt if isinstance(prompt, str) else _tokens(prompt) for prompt in given]
    known = tuple(prompt for prompt in prompts if prompt is not None)
    if not 0 < len(known) == len(given) <= MAX_PROMPTS:
        message = "must be a string, an array of token ids, or an array of 1 to {most} of either, not {got}"
        raise PydanticCustomError("part_type", message, {"most": MAX_PROMPTS, "got": shown(value)})
    return known


def _tokens(value: object) -> tuple[int, ...] | None:
    """The token ids of a prompt; None for anything else."""
    if not isinstance(value, list) or not value:
        return None
    return tuple(value) if all(type(item) is int and 0 <= item <= MAX_INT31 for item in value) else None


_Tokens = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT31)]], Field(min_length=1)]
Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    PlainValidator(
        _prompts,
        json_schema_input_type=str
        | _Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_PROMPTS)],
    ),
]


class CompletionRequest(Generation):
    """``POST /v1/completions``: a raw prompt, without the chat template."""

    model_config = ConfigDict(json_schema_extra=partial(add_properties, On.COMPLETIONS))

    prompt: Prompts
    """A text, its token ids, or several of either; the choices of each follow those of the one before."""
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    """Only without effect: 1, or as many as n."""


class LoadLoraRequest(Api):
    """``POST /v1/load_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME)
    """Name of the model that the adapter is to be served as."""
    lora_path: str = Field(min_length=1, max_length=4096)
    """Directory on the instances, below their lora_root."""
    parent: str | None = None
    """The base model; needed where several are served."""


class UnloadLoraRequest(Api):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME)


class TokenizeRequest(Api):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    """The default is the model that is served."""
    prompt: str | None = None
    messages: ApiMessages | None = None
    return_token_strs: bool | None = None
    """Whether to return token_strs; null otherwise."""
