"""The body of ``POST /v1/messages``, field by field. Other fields are those of ``request_fields``."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from triptych.domain.bounds import MAX_INT31

from .openai_fields import Keeping, type_tag
from .openai_models import MAX_MESSAGES, MAX_SALT_CHARS, MessagesSampling, ReasoningEffort, add_properties
from .openai_tools import MAX_CALL_ID_CHARS, MAX_TOOL_NAME_CHARS, MAX_TOOLS
from .request_fields import On
from .responses_models import text_or, typed

MAX_STOPS = 64


class TextBlock(Keeping):
    type: Literal["text"]
    text: str


class Base64Source(Keeping):
    type: Literal["base64"]
    data: str


class UrlSource(Keeping):
    type: Literal["url"]
    url: str
    """A data: URL, or an https: or http: URL that the server fetches."""


class ImageBlock(Keeping):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("#base64")] | Annotated[UrlSource, Tag("#url")],
        Discriminator(type_tag),
        typed("base64", "url"),
    ]


class ToolUseBlock(Keeping):
    """A call that the model made. Accepted if its chat template supports tool calls, else refused."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)
    input: dict[str, Any]


class ThinkingBlock(Keeping):
    """Reasoning of an earlier answer. The chat template decides whether the model sees it."""

    type: Literal["thinking"]
    thinking: str


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("#text")] | Annotated[ImageBlock, Tag("#image")],
    Discriminator(type_tag),
    typed("text", "image"),
]
ResultBlocks = TypeAliasType("ResultBlocks", Annotated[list[ResultBlock], FailFast()])


class ToolResultBlock(Keeping):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    content: Annotated[Annotated[str, Tag("#text")] | Annotated[ResultBlocks, Tag("#blocks")], text_or("#blocks")] = ""


UserBlock = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[ImageBlock, Tag("#image")]
    | Annotated[ToolResultBlock, Tag("#tool_result")],
    Discriminator(type_tag),
    typed("text", "image", "tool_result"),
]
UserBlocks = TypeAliasType("UserBlocks", Annotated[list[UserBlock], FailFast(), Field(min_length=1)])
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[ThinkingBlock, Tag("#thinking")]
    | Annotated[ToolUseBlock, Tag("#tool_use")],
    Discriminator(type_tag),
    typed("text", "thinking", "tool_use"),
]
AssistantBlocks = TypeAliasType("AssistantBlocks", Annotated[list[AssistantBlock], FailFast(), Field(min_length=1)])
TextBlocks = TypeAliasType(
    "TextBlocks", Annotated[list[Annotated[TextBlock, typed("text")]], FailFast(), Field(min_length=1)]
)
System = Annotated[Annotated[str, Tag("#text")] | Annotated[TextBlocks, Tag("#blocks")], text_or("#blocks")]


class UserTurn(Keeping):
    role: Literal["user", "system"]
    content: Annotated[Annotated[str, Tag("#text")] | Annotated[UserBlocks, Tag("#blocks")], text_or("#blocks")]


class AssistantTurn(Keeping):
    role: Literal["assistant"]
    content: Annotated[Annotated[str, Tag("#text")] | Annotated[AssistantBlocks, Tag("#blocks")], text_or("#blocks")]


def _role_tag(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return "#assistant" if role == "assistant" else "#user"


ClientMessage = Annotated[
    Annotated[UserTurn, Tag("#user")] | Annotated[AssistantTurn, Tag("#assistant")], Discriminator(_role_tag)
]
ClientMessages = TypeAliasType(
    "ClientMessages", Annotated[list[ClientMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
)


class MessagesTool(Keeping):
    """A tool of the client; those of the server are refused."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)
    description: str | None = None
    input_schema: dict[str, Any]


MessagesTools = TypeAliasType("MessagesTools", Annotated[list[MessagesTool], FailFast(), Field(max_length=MAX_TOOLS)])


class MessagesToolChoice(Keeping):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, min_length=1, max_length=MAX_TOOL_NAME_CHARS)
    """Name of the tool that must be called; with type tool only."""
    disable_parallel_tool_use: bool | None = None


class Thinking(Keeping):
    type: Literal["enabled", "disabled", "adaptive"]
    """The variable enable_thinking of the chat template, if it has one."""
    budget_tokens: int | None = Field(default=None, ge=1, le=MAX_INT31)
    """The variable thinking_budget of the chat template, if it has one."""


class OutputFormat(Keeping):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")
    """The JSON Schema that the answer must match."""


class OutputConfig(Keeping):
    effort: ReasoningEffort | None = None
    """The variable reasoning_effort of the chat template, if it has one."""
    format: OutputFormat | None = None


class CountTokensRequest(Keeping):
    """``POST /v1/messages/count_tokens``."""

    model_config = ConfigDict(json_schema_extra=partial(add_properties, On.MESSAGES))

    model: str
    messages: ClientMessages
    system: System | None = None
    tools: MessagesTools | None = None
    """Shown to the model if its chat template supports tools, else refused."""
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""


class MessagesRequest(MessagesSampling, CountTokensRequest):
    """``POST /v1/messages``."""

    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_CHARS)
    """Embeddings are shared only between requests with the same salt."""
    max_tokens: int = Field(ge=1, le=MAX_INT31)
    stream: bool | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        default=None, max_length=MAX_STOPS
    )
