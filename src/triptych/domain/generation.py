"""What a text instance is asked to do, and what it streams back."""

from dataclasses import dataclass
from enum import Enum

from triptych.domain.embedding import Ticket
from triptych.domain.sampling import SamplingParams


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an item's embedding goes in the prompt: the run of ``tokens`` placeholder ids that starts at ``start``."""

    item: int
    start: int
    ticket: Ticket

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
class TokenChunk:
    """Tokens that were ready together, with the text they complete.

    ``text`` may be empty while a multi-byte character or a possible stop string is incomplete.
    """

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a stream that did not fail."""

    reason: FinishReason
    completion_tokens: int
    prefill_s: float
    decode_s: float


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
class ChatFinished:
    """The last event that the router sends for a request that did not fail."""

    reason: FinishReason
    usage: Usage


ChatEvent = TokenChunk | ChatFinished
"""What the router streams back; failures are raised."""
