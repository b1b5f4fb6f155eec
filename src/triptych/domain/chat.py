"""What a client asks for: a conversation over text and media, before any of it is tokenized."""

from dataclasses import dataclass, field
from typing import Literal

from triptych.domain.bounds import Between
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams

PRIORITY = Between(-(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An item's undecoded bytes. Whether they are what ``modality`` says is for the router to find out."""

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


@dataclass(frozen=True, slots=True)
class Message:
    """``tool_calls`` are an assistant's; ``tool_call_id`` says which of them a tool's message answers."""

    role: SpeakerRole
    parts: tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the model is to do with the tools it is told of: by itself it may call any of them, or none."""

    required: bool = False
    """It makes a call, of whichever."""
    name: str = ""
    """It makes one call, of this one."""
    parallel: bool = True
    """It may make several calls in one answer."""

    @property
    def forces(self) -> bool:
        return self.required or bool(self.name)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """What the model would see of a request. ``token_strs`` are the tokens as the vocabulary spells them, if asked for."""

    token_ids: tuple[int, ...]
    token_strs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request as the router takes it, from the gateway and from the SDK alike."""

    request_id: str
    model: str
    messages: tuple[Message, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout_s: float = 120.0
    """Time left for the whole request when it is sent."""
    tenant_salt: bytes = b""
    """Keeps the caller's embeddings apart from other tenants'; empty only where all may share."""
    prompt: str | None = None
    """A raw prompt, tokenized as it stands; ``messages`` is empty then."""
    tools: str = ""
    """A JSON array of tools for the chat template, in the OpenAI API's form; empty for none."""
    tool_choice: ToolChoice = ToolChoice()
    priority: int = 0
    """Where requests wait for encoders or the engine, lower ones go first; equal ones by the time they have left.

    Pulls go by that time alone: they are done before a request waits for the engine.
    """

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """The media parts in the order in which the prompt mentions them."""
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, MediaPart))
