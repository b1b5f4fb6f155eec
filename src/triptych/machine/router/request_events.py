"""Events and effects of a request's machine. Calls are identified by their credit."""

from enum import Enum
from typing import Literal

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.generation import Finished, Placement, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.kv_segment import KnownSegment, KvPlacement, SealedSegment
from triptych.domain.queue_position import QueuePosition
from triptych.domain.record import record
from triptych.domain.resolving import ResolvedItem
from triptych.domain.slo import NOTHING_EXPECTED, Expected
from triptych.errors import TriptychError
from triptych.machine.router.prompt_identity import PromptTokens
from triptych.machine.router.shared_events import (
    Answer,
    CallFailed,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    EmbeddingsRead,
    FirstToken,
    HedgeWanted,
    ItemEncoded,
    LeasesTaken,
    Overtaken,
    Release,
    TextWanted,
)

# --- events ----------------------------------------------------------------------------------------------------------


@record
class Prepared:
    """The request is inspected, tokenized and admitted. ``answer_tokens`` is the answer's limit."""

    items: tuple[ItemPlan, ...]
    prompt_tokens: int
    answer_tokens: int
    expected: Expected = NOTHING_EXPECTED
    prompt: PromptTokens | None = None
    """The prompt, if the beginning of it is to be looked for at other instances."""


@record
class TextReported:
    """The text instance has the request's embeddings, or has finished a choice."""

    credit: int
    what: Ready | Finished


@record
class AnswerTransferred:
    """The text instance has ended its call before the answer. The answer goes on after what it has sent, with these segments."""

    credit: int
    name: str
    segments: tuple[SealedSegment, ...]
    prefill_s: float = 0.0


@record
class PrefilledEarly:
    """The beginning of the prompt that was sent is computed."""

    credit: int


@record
class Resumed:
    """The pause of this number has ended."""

    number: int


class Signal(Enum):
    """Events without data."""

    LEASES_DUE = "leases are to be extended"
    HEDGES_DUE = "items may take longer than others of their size"
    CALLER_LEFT = "the client disconnected or needs no more, or the process is ending"
    DEADLINE_PASSED = "the deadline has passed"


@record
class Failed:
    """The request is invalid, or the router failed."""

    error: TriptychError


# --- effects ---------------------------------------------------------------------------------------------------------


@record
class Encode:
    """Encode an item or shard. ``index`` counts shards too."""

    credit: int
    name: str
    index: int
    plan: ItemPlan
    reader_lease: LeaseId
    router_lease: LeaseId
    lease_s: float
    queue_position: QueuePosition
    """Position in the encoder's queue."""
    reason: str


class AttemptKind(Enum):
    """The part of a request that an instance is to do."""

    ENCODE = "encode"
    EARLY_PREFILL = "early prefill"
    """An attempt that computes the prompt up to an item that is still being encoded (docs/adr/0043)."""
    PREFILL = "prefill"
    """An attempt that stops after the first token of each choice, and transfers."""
    DECODE = "decode"
    """An attempt that goes on with the answer that has been sent so far."""
    WHOLE = "whole"
    """An attempt that computes the prompt and the answer."""


@record
class Generate:
    """Send the request, or the first ``tokens`` tokens of its prompt, to the text instance."""

    credit: int
    name: str
    kind: AttemptKind
    placements: tuple[Placement, ...]
    queue_position: QueuePosition
    """Position in the queues there."""
    tokens: int | None = None
    """Tokens of the prompt, for an early prefill; None for all."""
    kv_segments: tuple[KvPlacement, ...] = ()
    """Keys and values that it may pull instead of computing them."""
    kv_lease_s: float = 0.0
    """How long it keeps those that it transfers."""
    prefix: tuple[KnownSegment, ...] = ()
    """Segments of the prompt that others are believed to hold: those that can be leased are sent with it."""


@record
class Renew:
    """Request leases from an instance on what these tickets are of: for another reader, or for longer under ids of leases that exist.

    They are requested one after the other, up to the first that is refused. Renewed follows.
    """

    credit: int
    """The credit of the attempt that left it there."""
    name: str
    tickets: tuple[Ticket, ...]
    lease_ids: tuple[LeaseId, ...]
    """The ids of the leases, one for each ticket."""
    lease_s: float
    reason: str
    extends: bool = False
    """The leases exist. The request goes on meanwhile, and whatever comes of it."""


@record
class Renewed:
    """Result of Renew: the tickets that were granted, and why there are no more."""

    renew: Renew
    requested_s: float
    tickets: tuple[Ticket, ...]
    error: TriptychError | None = None


@record
class Resolved:
    """Tell the caller where the items are. They are held until the request ends."""

    items: tuple[ResolvedItem, ...]


@record
class Abort:
    """Cancel the running call of this credit, if any."""

    credit: int
    reason: str


@record
class After:
    """Send this event after the delay."""

    delay_s: float
    event: Resumed | Literal[Signal.LEASES_DUE, Signal.HEDGES_DUE]
    reason: str


@record
class End:
    """The request is over; ``error`` is None on success."""

    error: TriptychError | None


ToCluster = (
    CreditsWanted
    | CreditsAbandoned
    | TextWanted
    | EmbeddingGone
    | EmbeddingsRead
    | HedgeWanted
    | Overtaken
    | LeasesTaken
)
"""Effects that are events of the cluster machine."""

RequestEffect = ToCluster | Encode | Renew | Generate | Resolved | Abort | After | Release | End

RequestEvent = (
    Prepared
    | Answer
    | ItemEncoded
    | Renewed
    | FirstToken
    | TextReported
    | AnswerTransferred
    | PrefilledEarly
    | CallFailed
    | Resumed
    | Failed
    | Signal
)
