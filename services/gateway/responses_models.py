"""The body of ``POST /v1/responses``, field by field. Other fields are those of ``request_fields``."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from triptych.domain.bounds import MAX_INT31
from triptych.domain.chat import PRIORITY

from .openai_fields import Keeping, shown, type_tag
from .openai_models import (
    MAX_MESSAGES,
    MAX_SALT_CHARS,
    ReasoningEffort,
    ResponsesSampling,
    ServiceTier,
    TopLogprobs,
    add_properties,
)
from .openai_tools import MAX_CALL_ID_CHARS, MAX_TOOL_NAME_CHARS, MAX_TOOLS
from .request_fields import On

MAX_ID_CHARS = 256


def typed(*kinds: str, default: str = "") -> BeforeValidator:
    """Names all types in the error of an object of another, instead of one error per class of a union."""
    names = [repr(kind) for kind in kinds]
    listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))

    def check(value: object) -> object:
        kind = value.get("type", default) if isinstance(value, dict) else None
        if kind not in kinds:
            got = {"got": shown(value if kind is None else kind)}
            raise PydanticCustomError("part_type", f"must be an object of type {listed}, not {{got}}", got)
        return value

    return BeforeValidator(check)


def text_or(listed: str) -> Discriminator:
    """Tells a string apart, so that errors name the field alone."""
    return Discriminator(lambda value: "#text" if isinstance(value, str) else listed)


class InputText(Keeping):
    type: Literal["input_text", "output_text"]
    text: str


class InputImage(Keeping):
    type: Literal["input_image"]
    image_url: str
    """A data: URL, or an https: or http: URL that the server fetches."""


class InputAudioData(Keeping):
    data: str
    """The file in base64, or as a data: URL."""


class InputAudio(Keeping):
    type: Literal["input_audio"]
    input_audio: InputAudioData


InputPart = Annotated[
    Annotated[InputText, Tag("#input_text")]
    | Annotated[InputText, Tag("#output_text")]
    | Annotated[InputImage, Tag("#input_image")]
    | Annotated[InputAudio, Tag("#input_audio")],
    Discriminator(type_tag),
    typed("input_text", "output_text", "input_image", "input_audio"),
]
InputParts = TypeAliasType("InputParts", Annotated[list[InputPart], FailFast()])
InputContent = Annotated[Annotated[str, Tag("#text")] | Annotated[InputParts, Tag("#parts")], text_or("#parts")]


class InputMessage(Keeping):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent


class InputCall(Keeping):
    """A call that the model made. Accepted if its chat template supports tool calls, else refused."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)
    arguments: str
    """A JSON object, as text."""


class InputCallOutput(Keeping):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    output: InputContent


class ReasoningText(Keeping):
    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = TypeAliasType("ReasoningTexts", Annotated[list[ReasoningText], FailFast()])


class InputReasoning(Keeping):
    """Reasoning of an earlier answer. The chat template decides whether the model sees it."""

    type: Literal["reasoning"]
    content: ReasoningTexts | None = None
    summary: ReasoningTexts | None = None
    """Used if there is no content."""


def _item_tag(value: Any) -> str:
    return f"#{value.get('type', 'message') if isinstance(value, dict) else value.type}"


InputItem = Annotated[
    Annotated[InputMessage, Tag("#message")]
    | Annotated[InputCall, Tag("#function_call")]
    | Annotated[InputCallOutput, Tag("#function_call_output")]
    | Annotated[InputReasoning, Tag("#reasoning")],
    Discriminator(_item_tag),
    typed("message", "function_call", "function_call_output", "reasoning", default="message"),
]
InputItems = TypeAliasType(
    "InputItems", Annotated[list[InputItem], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
)


class ResponsesTool(Keeping):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, Any] | None = None


ResponsesTools = TypeAliasType(
    "ResponsesTools",
    Annotated[list[Annotated[ResponsesTool, typed("function")]], FailFast(), Field(max_length=MAX_TOOLS)],
)


class ResponsesNamedTool(Keeping):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#text")]
    | Annotated[ResponsesNamedTool, typed("function"), Tag("#named")],
    text_or("#named"),
]


class FormatText(Keeping):
    type: Literal["text"]


class FormatObject(Keeping):
    type: Literal["json_object"]


class FormatSchema(Keeping):
    type: Literal["json_schema"]
    name: str | None = Field(default=None, max_length=256)
    json_schema: dict[str, Any] = Field(alias="schema")
    """The JSON Schema that the answer must match."""


Format = Annotated[
    Annotated[FormatText, Tag("#text")]
    | Annotated[FormatObject, Tag("#json_object")]
    | Annotated[FormatSchema, Tag("#json_schema")],
    Discriminator(type_tag),
    typed("text", "json_object", "json_schema"),
]


class TextConfig(Keeping):
    format: Format | None = None


class ReasoningConfig(Keeping):
    effort: ReasoningEffort | None = None
    """The variable reasoning_effort of the chat template, if it has one."""


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ResponsesRequest(ResponsesSampling):
    """``POST /v1/responses``."""

    model_config = ConfigDict(json_schema_extra=partial(add_properties, On.RESPONSES))

    model: str
    input: Annotated[Annotated[str, Tag("#text")] | Annotated[InputItems, Tag("#items")], text_or("#items")]
    instructions: str | None = None
    """A system message before all others. Those of the previous response do not count any more."""
    previous_response_id: str | None = Field(default=None, max_length=MAX_ID_CHARS)
    """A stored response of the same key: the conversation goes on after it."""
    store: bool | None = None
    """Whether the response is stored in this gateway for a while. The default is true."""
    stream: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_INT31)
    tools: ResponsesTools | None = None
    """Shown to the model if its chat template supports tools, else refused."""
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """Whether one answer may contain several calls. The default is true."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Annotated[str, Field(max_length=64)]] | None = Field(default=None, max_length=32)
    """message.output_text.logprobs: log-probabilities of tokens."""
    top_logprobs: TopLogprobs | None = None
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    """A priority, if none is given: flex goes after others, priority before them if the key allows it."""
    priority: int | None = Field(default=None, ge=PRIORITY.low, le=PRIORITY.high)
    """Lower values are served first; equal ones by the time they have left (x-request-timeout). The default is 0."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_CHARS)
    """Embeddings are shared only between requests with the same salt."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text. The default is true."""
    include_reasoning: bool | None = None
    """Whether the answer has its reasoning. The default is true."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
