"""What a text instance is asked to do, and what it streams back."""

from dataclasses import dataclass
from enum import Enum

from triptych.domain.chat import ToolCall
from triptych.domain.embedding import Ticket
from triptych.domain.sampling import SamplingParams


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """It stopped after it had made calls; only the router tells them from text."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an embedding goes in the prompt: the first ``tokens`` placeholders at or after position ``start``.

    It is an item's or, where ``continues``, that of a further shard of the item of the placement before it.
    """

    item: int
    """Its number: of embeddings, where items are cut."""
    start: int
    ticket: Ticket
    continues: bool = False

    @property
    def tokens(self) -> int:
        return self.ticket.tokens


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A tokenized prompt whose items are all encoded. ``sampling.max_tokens`` is always set here."""

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    placements: tuple[Placement, ...]
    sampling: SamplingParams
    timeout_s: float
    priority: int = 0
    """Lower goes first, whatever time is left."""
    tenant_salt: bytes = b""
    """What was computed of a prompt is shared only with requests that have the same."""


@dataclass(frozen=True, slots=True)
class PullReport:
    """One item's journey into the text instance, for the timeline. ``nbytes`` is 0 on a cache hit."""

    item: int
    backend: str
    nbytes: int
    duration_s: float
    cached: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything has arrived and prefill is next. Sent once, before the first token."""

    pulls: tuple[PullReport, ...]
    queue_s: float
    pull_s: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could stand at a position. ``token`` is its bytes, which need not be whole characters."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token at one position, and the likeliest that could have stood there, best first."""

    chosen: Alternative
    top: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of one choice that were ready together, with the text they complete.

    ``text`` may be empty while a multi-byte character or a possible stop string is incomplete. ``logprobs`` has an
    entry per token where they were asked for, and is empty otherwise.
    """

    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a choice; a stream that did not fail ends with one for each of its choices."""

    reason: FinishReason
    completion_tokens: int
    prefill_s: float
    decode_s: float
    choice: int = 0


TextEvent = Ready | TokenChunk | Finished


@dataclass(frozen=True, slots=True)
class Usage:
    """``prompt_tokens`` counts the positions of images too, as the model sees them."""

    prompt_tokens: int
    completion_tokens: int
    image_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ToolCallMade:
    """One whole call, the ``index``-th of its choice. Its tokens came in chunks, whose text it is not part of."""

    call: ToolCall
    index: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The last event of one choice."""

    reason: FinishReason
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ChatFinished:
    """The last event that the router sends for a request that did not fail: every choice is finished."""

    usage: Usage


ChatEvent = TokenChunk | ToolCallMade | ChoiceFinished | ChatFinished
"""What the router streams back; failures are raised."""
