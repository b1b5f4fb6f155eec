"""Events and effects of a request's machine. Calls are identified by their credit."""

from dataclasses import dataclass

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.generation import Finished, Placement, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.errors import TriptychError
from triptych.machine.router.shared_events import (
    Answer,
    CallFailed,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    FirstToken,
    ItemEncoded,
    Release,
    TextWanted,
)

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """The request is inspected, tokenized and admitted. ``answer_tokens`` is the answer's limit."""

    items: tuple[ItemPlan, ...]
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Result of Renew."""

    credit: int
    name: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class LeasesDue:
    """The time of ``Alarm`` has come."""


@dataclass(frozen=True, slots=True)
class LeasesExtended:
    """Result of Extend: these leases, including the router's own, last ``lease_s`` from then on."""

    credit: int
    lease_ids: tuple[LeaseId, ...]
    requested_s: float
    lease_s: float


@dataclass(frozen=True, slots=True)
class TextReady:
    credit: int
    ready: Ready


@dataclass(frozen=True, slots=True)
class TextFinished:
    """One choice has finished."""

    credit: int
    finished: Finished


@dataclass(frozen=True, slots=True)
class Resumed:
    """The pause of this number has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is invalid, or the router failed."""

    error: TriptychError


@dataclass(frozen=True, slots=True)
class CallerLeft:
    """The client disconnected, or the process is ending."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


RequestEvent = (
    Prepared
    | Answer
    | ItemEncoded
    | LeaseGranted
    | LeasesDue
    | LeasesExtended
    | FirstToken
    | TextReady
    | TextFinished
    | CallFailed
    | Resumed
    | Failed
    | CallerLeft
    | DeadlinePassed
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode an item or shard. ``index`` counts shards too."""

    credit: int
    name: str
    index: int
    plan: ItemPlan
    reader_lease: LeaseId
    router_lease: LeaseId
    lease_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Request a new reader's lease from the holder."""

    credit: int
    name: str
    key: bytes
    generation: int
    lease_id: LeaseId
    lease_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Extend:
    """Extend leases. LeasesExtended follows if the first one was extended, else nothing."""

    credit: int
    name: str
    key: bytes
    generation: int
    lease_ids: tuple[LeaseId, ...]
    lease_s: float


@dataclass(frozen=True, slots=True)
class Generate:
    """Send the request to the text instance."""

    credit: int
    name: str
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel the running call of this credit, if any."""

    credit: int
    reason: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Send LeasesDue after this delay."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Send Resumed after this delay."""

    number: int
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The request is over; ``error`` is None on success."""

    error: TriptychError | None


ToCluster = CreditsWanted | CreditsAbandoned | TextWanted | EmbeddingGone
"""Effects that are events of the cluster machine."""

RequestEffect = ToCluster | Encode | Renew | Extend | Generate | Abort | Alarm | Pause | Release | End
