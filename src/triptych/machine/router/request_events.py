"""What a request's machine is told, and what it says is to be done. Calls are known by their credit."""

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
    """Sniffed, tokenized, counted and admitted. ``answer_tokens`` is the most that the answer may have."""

    items: tuple[ItemPlan, ...]
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """The answer to Renew."""

    credit: int
    name: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class LeasesDue:
    """The time is over that ``Alarm`` named."""


@dataclass(frozen=True, slots=True)
class LeasesExtended:
    """The answer to Extend: these leases last ``lease_s`` from ``asked_s`` on; the router's own is among them."""

    credit: int
    lease_ids: tuple[LeaseId, ...]
    asked_s: float
    lease_s: float


@dataclass(frozen=True, slots=True)
class TextReady:
    credit: int
    ready: Ready


@dataclass(frozen=True, slots=True)
class TextFinished:
    """One choice is at its end."""

    credit: int
    finished: Finished


@dataclass(frozen=True, slots=True)
class Resumed:
    """The pause of this number is over."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request itself is at fault, or the router is."""

    error: TriptychError


@dataclass(frozen=True, slots=True)
class CallerLeft:
    """The client went away, or the process is told to end."""


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
    """``index`` is the item's among the request's, shards counted each."""

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
    """Get a fresh reader's lease from the instance that holds the embedding."""

    credit: int
    name: str
    key: bytes
    generation: int
    lease_id: LeaseId
    lease_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Extend:
    """Ask for more time for leases; LeasesExtended follows if the first of them has it, nothing if not."""

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
    """Cancel the call that runs for this credit, if it still does."""

    credit: int
    reason: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Say LeasesDue after so long."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Say Resumed after so long."""

    number: int
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The request is over; ``error`` is None when it is done."""

    error: TriptychError | None


ToCluster = CreditsWanted | CreditsAbandoned | TextWanted | EmbeddingGone
"""Effects that are events of the cluster's machine."""

RequestEffect = ToCluster | Encode | Renew | Extend | Generate | Abort | Alarm | Pause | Release | End
