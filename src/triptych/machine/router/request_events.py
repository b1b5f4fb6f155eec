"""Events and effects of a request's machine. Calls are identified by their credit."""

from enum import Enum
from typing import Literal

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.generation import Finished, Placement, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.kv_segment import KnownSegment, KvPlacement, SealedSegment
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
from triptych.policy.fairness import UNSHARED, Share
from triptych.policy.queueing import Turn

# --- events ----------------------------------------------------------------------------------------------------------


@record
class Prepared:
    """The request is inspected, tokenized and admitted. ``answer_tokens`` is the answer's limit."""

    items: tuple[ItemPlan, ...]
    prompt_tokens: int
    answer_tokens: int
    expected: Expected = NOTHING_EXPECTED
    share: Share = UNSHARED
    """Its tenant's, of the encoders."""
    prompt: PromptTokens | None = None
    """Its prompt, if the beginning of it is to be looked for at other instances."""


@record
class LeaseGranted:
    """Result of Renew."""

    credit: int
    name: str
    ticket: Ticket


@record
class LeasesExtended:
    """Result of Extend: these leases, including the router's own, last ``lease_s`` from then on."""

    credit: int
    lease_ids: tuple[LeaseId, ...]
    requested_s: float
    lease_s: float


@record
class TextReported:
    """The text instance has the request's embeddings, or has finished a choice."""

    credit: int
    what: Ready | Finished


@record
class AnswerHandedOver:
    """The text instance has ended its call before the answer. The answer goes on after what it has sent, with these segments."""

    credit: int
    name: str
    segments: tuple[SealedSegment, ...]
    prefill_s: float = 0.0


@record
class SegmentsRenewed:
    """Result of RenewSegments: tickets with the new leases, in their order; None for what could not be leased."""

    credit: int
    name: str
    tickets: tuple[Ticket | None, ...]


@record
class PrefilledEarly:
    """The beginning that was sent with PrefillEarly is computed."""

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


RequestEvent = (
    Prepared
    | Answer
    | ItemEncoded
    | LeaseGranted
    | LeasesExtended
    | FirstToken
    | TextReported
    | AnswerHandedOver
    | SegmentsRenewed
    | PrefilledEarly
    | CallFailed
    | Resumed
    | Failed
    | Signal
)

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
    turn: Turn
    """Its position in the encoder's queue."""
    reason: str


@record
class Renew:
    """Request a new reader's lease from the holder."""

    credit: int
    name: str
    key: bytes
    generation: int
    lease_id: LeaseId
    lease_s: float
    reason: str


@record
class Extend:
    """Extend leases. LeasesExtended follows if the first one was extended, else nothing."""

    credit: int
    name: str
    key: bytes
    generation: int
    lease_ids: tuple[LeaseId, ...]
    lease_s: float


@record
class Generate:
    """Send the request to the text instance. With ``continues`` it goes on with the answer that has been sent so far."""

    credit: int
    name: str
    placements: tuple[Placement, ...]
    turn: Turn
    """Its position in the queues there."""
    continues: bool = False
    hands_over: bool = False
    """The instance stops after the first token of each choice."""
    kv_segments: tuple[KvPlacement, ...] = ()
    """Keys and values that it may pull instead of computing them."""
    kv_lease_s: float = 0.0
    """How long it keeps those that it hands over."""
    prefix: tuple[KnownSegment, ...] = ()
    """Segments of the prompt that others are believed to hold: those that can be leased are sent with it."""


@record
class RenewSegments:
    """Request new reader's leases on segments from the instance that holds them. ``credit`` was that of the call that sealed them."""

    credit: int
    name: str
    tickets: tuple[Ticket, ...]
    lease_ids: tuple[LeaseId, ...]
    lease_s: float
    reason: str


@record
class PrefillEarly:
    """Have the text instance compute the first ``tokens`` tokens of the prompt, while items are being encoded."""

    credit: int
    name: str
    placements: tuple[Placement, ...]
    tokens: int
    turn: Turn


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

RequestEffect = (
    ToCluster
    | Encode
    | Renew
    | RenewSegments
    | Extend
    | Generate
    | PrefillEarly
    | Resolved
    | Abort
    | After
    | Release
    | End
)
