"""Requests to a text instance, and the events that it and the router stream back."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from triptych.domain.chat import ToolCall
from triptych.domain.continuation import ContinuedChoice, begun
from triptych.domain.embedding import Ticket
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.domain.queue_position import BY_TIME_LIMIT, RelativeQueuePosition
from triptych.domain.record import record
from triptych.domain.sampling import SamplingParams


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """A stop after tool calls. Only the router recognises them in the text."""


@record
class Placement:
    """Where an embedding goes in the prompt: the first ``tokens`` placeholders at or after position ``start``.

    It belongs to a new item or, with ``continues``, is a further shard of the previous placement's item.
    """

    item: int
    """The item's index; with shards, the embedding's."""
    start: int
    ticket: Ticket
    continues: bool = False

    @property
    def tokens(self) -> int:
        return self.ticket.tokens


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A tokenized prompt whose items are all encoded. ``sampling.max_tokens`` is always set.

    With ``continued`` it is a continuation: an answer that another instance began goes on with these choices only, each
    after its tokens. Nothing else is transferred. As a token depends on the request, its seed, the choice and the tokens
    before, the answer is the one that the first instance would have given; so the router always sets the seed.
    """

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    placements: tuple[Placement, ...]
    sampling: SamplingParams
    timeout_s: float
    priority: int = 0
    """Lower values go first, whatever time is left."""
    tenant_salt: bytes = b""
    """Cached prefixes are shared only between requests of equal salt."""
    position: RelativeQueuePosition = BY_TIME_LIMIT
    continued: tuple[ContinuedChoice, ...] = ()
    """In ascending order of their choices; empty for a new answer."""
    early: bool = False
    """Whether it is the prefix of a prompt, computed for the prefix cache: what is generated after it is no answer."""
    transfers_kv: bool = False
    """Whether it ends with ``KvTransferred`` after the first token of each choice that has not finished with it: prefill only."""
    kv_segments: tuple[KvPlacement, ...] = ()
    """Keys and values of the prompt, and of the tokens in ``continued``, that can be pulled instead of computed. What they do not
    cover, and what cannot be pulled, is computed."""
    kv_lease_s: float = 0.0
    """How long the instance keeps segments that it transfers. 0 from a caller that takes no ``KvTransferred``."""
    whole: bool = False
    """As in ``ChatRequest``: after the first tokens, the others may wait a moment for each other."""
    lora: str = ""
    """Digest of the LoRA adapter that it is computed with; empty without one."""

    @property
    def begun(self) -> Mapping[int, tuple[int, ...]]:
        """The choices to run, and the tokens that each has already."""
        return begun(self.sampling.n, self.continued)


@record
class PullReport:
    """How one item was pulled, for the timeline. ``nbytes`` is 0 on a cache hit."""

    item: int
    backend: str
    nbytes: int
    duration_s: float
    cached: bool


@record
class KvReport:
    """How the keys and values of a continuation arrived, for the timeline."""

    pulled_tokens: int = 0
    cached_tokens: int = 0
    """Found in the instance: pulled before, or in its prefix cache."""
    computed_tokens: int = 0
    """To be computed, as no segment covers them or it could not be pulled."""
    nbytes: int = 0
    """Bytes pulled."""
    pull_s: float = 0.0


@record
class Ready:
    """All embeddings have arrived and prefill is next. Sent once, before the first token."""

    pulls: tuple[PullReport, ...]
    queue_s: float
    pull_s: float
    kv: KvReport | None = None
    """None without ``kv_segments``."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A possible token at a position. ``token`` is its bytes, which may be part of a character."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token at one position, and the most likely alternatives, best first."""

    chosen: Alternative
    top: tuple[Alternative, ...]


@record
class TokenChunk:
    """Tokens of one choice that were produced together, with the text they complete.

    ``text`` may be empty while a multi-byte character or a possible stop string is incomplete. ``logprobs`` has one
    entry per token if requested, else it is empty.
    """

    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    waited_s: float = 0.0
    """How long its last token has waited at the text instance for others, seconds."""


@record
class Finished:
    """The last event of a choice; a successful stream has one per choice."""

    reason: FinishReason
    completion_tokens: int
    prefill_s: float
    decode_s: float
    choice: int = 0
    preemptions: int = 0
    """Times that it was preempted for want of KV memory ..."""
    preempted_s: float = 0.0
    """... and the gaps between tokens in which that was. It is part of ``decode_s``."""
    cached_tokens: int = 0
    """Tokens of the prompt, and of a continuation's answer, that the prefix cache had."""


@record
class KvTransferred:
    """The last event of an instance that does not go on: the answer continues elsewhere, after the tokens sent so far.

    Segments are in ascending order; they cover a beginning of each unfinished choice, at most to before its last token.
    ``prefill_s``: from the start of its computation to the first token here.
    """

    segments: tuple[SealedSegment, ...]
    prefill_s: float = 0.0


TextEvent = Ready | TokenChunk | Finished | KvTransferred


@dataclass(frozen=True, slots=True)
class Usage:
    """``prompt_tokens`` includes placeholder tokens of items, ``completion_tokens`` those of reasoning."""

    prompt_tokens: int
    completion_tokens: int
    image_tokens: int = 0
    audio_tokens: int = 0
    video_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in a prefix cache."""
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ToolCallMade:
    """The ``index``-th call of its choice. Its tokens are sent in chunks, without its text.

    It is complete; or it has no arguments, and they follow in pieces, if the request ``streams_arguments``.
    """

    call: ToolCall
    index: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the arguments of the ``index``-th call of a choice. Together they are a JSON object, unless the model broke off."""

    text: str
    index: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A piece of a choice's reasoning. Its tokens were sent in chunks, without its text."""

    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class FieldsIgnored:
    """Request fields that the model's chat template does not use. Sent with the first event, if there are any."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The last event of one choice."""

    reason: FinishReason
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ChatFinished:
    """The last event of a successful request: every choice has finished."""

    usage: Usage


ChatEvent = TokenChunk | ToolCallMade | ToolArguments | Reasoned | FieldsIgnored | ChoiceFinished | ChatFinished
"""Events of the router; failures are raised as exceptions."""
