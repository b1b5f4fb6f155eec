"""A client's request: a conversation of text and media, before tokenization."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from triptych.domain.bounds import Between
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.tenant import Tenant

PRIORITY = Between(-(2**31), 2**31 - 1)
MAX_TEMPLATE_KWARGS_CHARS = 64 << 10


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An item's undecoded bytes. The router checks that they match ``modality``."""

    modality: Modality
    data: bytes


Part = TextPart | MediaPart
SpeakerRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. ``arguments`` is a JSON object as text."""

    call_id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name. Raises ValueError for text that is not JSON."""
        values: dict[str, Any] = json.loads(self.arguments)
        return values


@dataclass(frozen=True, slots=True)
class Message:
    """``tool_calls`` and ``reasoning`` belong to an assistant's message; ``tool_call_id`` names the call that a tool's
    message answers.
    """

    role: SpeakerRole
    parts: tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    """What the model thought before it answered, for templates that show it."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tools that the model may or must call. By default it may call any of them, or none."""

    required: bool = False
    """Whether the model must make a call."""
    name: str = ""
    """Tool that the model must call, once."""
    parallel: bool = True
    """Whether the model may make several calls in one answer."""

    @property
    def forces(self) -> bool:
        return self.required or bool(self.name)


ANY_TOOL = ToolChoice()


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The prompt's token ids. ``token_strs`` are the tokens' strings in the vocabulary, if requested."""

    token_ids: tuple[int, ...]
    token_strs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request to the router, from the gateway or the SDK."""

    request_id: str
    model: str
    messages: tuple[Message, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout_s: float = 120.0
    """Time limit of the request, from when it is sent."""
    tenant_salt: bytes = b""
    """Separates cached embeddings of tenants; empty only if all may share."""
    prompt: str | None = None
    """A raw prompt, tokenized unchanged; ``messages`` is empty then."""
    prompt_tokens: tuple[int, ...] = ()
    """A raw prompt's token ids; ``prompt`` is an empty text then."""
    tools: str = ""
    """A JSON array of tools for the chat template, in the OpenAI API's format; empty for none."""
    tool_choice: ToolChoice = ANY_TOOL
    priority: int = 0
    """Lower values are served first; equal ones by the time they have left. Pulls are ordered by the time left alone,
    as they precede the wait for the engine."""
    tenant: Tenant | None = None
    """Tenant whose share of the service the request takes. None: the share of all who name none."""

    continued: tuple[ContinuedChoice, ...] = ()
    """Choices that have not ended of an answer that another router began, in their order. Empty for a new answer. They
    go on after these tokens, as ``sampling`` has the seed.
    """
    whole: bool = False
    """Whether the caller reads the answer when it is complete: tokens may wait a moment for others, and come with them."""
    template_kwargs: str = ""
    """Further variables of the chat template, a JSON object; empty for none."""
    separates_reasoning: bool = False
    """Whether reasoning comes in events of its own, which callers of the release before do not know; else it is text."""
    streams_arguments: bool = False
    """Whether the arguments of calls come in pieces; else each call comes when it is complete."""

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """The media parts, in prompt order."""
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, MediaPart))

    @property
    def begun_tokens(self) -> int:
        """Tokens of its unfinished choices that its caller has already."""
        return sum(len(choice.token_ids) for choice in self.continued)
