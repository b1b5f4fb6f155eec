"""What a request's machine is told, and what it says is to be done. Calls are known by credit (items) or attempt (text)."""

from dataclasses import dataclass

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Finished, Placement, Ready
from triptych.domain.media import MediaInfo, Shard
from triptych.errors import TriptychError
from triptych.machine.router.cluster_events import Grant
from triptych.policy.routing import Content, Want


@dataclass(frozen=True, slots=True)
class CountedItem:
    """An item, or a shard of one, as the router counted it: where its placeholders are, what its embedding takes."""

    item: int
    """Which of the request's items it is, or belongs to."""
    info: MediaInfo
    content: Content
    start: int
    tokens: int
    nbytes: int
    param: str
    """The request field that brought it: ``messages[0].content[1]``."""
    shard: Shard | None = None


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """Sniffed, tokenized, counted and admitted."""

    items: tuple[CountedItem, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class CreditsGranted:
    """Credits for every item that was asked for."""

    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class CreditsRefused:
    error: TriptychError


@dataclass(frozen=True, slots=True)
class ItemEncoded:
    """``instance_id`` is the encoder's own; ``asked_s`` is when the call was made, so that no lease is overrated."""

    item: int
    credit: int
    encoder: str
    instance_id: str
    result: EncodeResult
    asked_s: float
    lease_s: float


@dataclass(frozen=True, slots=True)
class ItemFailed:
    item: int
    credit: int
    error: TriptychError


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    item: int
    credit: int
    encoder: str
    ticket: Ticket
    asked_s: float
    lease_s: float


@dataclass(frozen=True, slots=True)
class LeasesDue:
    """The time is over that ``Alarm`` named."""


@dataclass(frozen=True, slots=True)
class LeasesExtended:
    """These leases on an item last ``lease_s`` from ``asked_s`` on; the router's own is among them."""

    item: int
    credit: int
    lease_ids: tuple[LeaseId, ...]
    asked_s: float
    lease_s: float


@dataclass(frozen=True, slots=True)
class LeaseFailed:
    item: int
    credit: int
    error: TriptychError


@dataclass(frozen=True, slots=True)
class TextChosen:
    """``text`` names it for the router, ``instance_id`` for people."""

    attempt: int
    text: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class NoText:
    """There is no text instance to be had."""

    attempt: int
    error: TriptychError


@dataclass(frozen=True, slots=True)
class TextReady:
    attempt: int
    ready: Ready


@dataclass(frozen=True, slots=True)
class FirstToken:
    attempt: int


@dataclass(frozen=True, slots=True)
class TextFinished:
    attempt: int
    finished: Finished


@dataclass(frozen=True, slots=True)
class TextFailed:
    attempt: int
    error: TriptychError


@dataclass(frozen=True, slots=True)
class Failed:
    """The request itself is at fault, or the router is."""

    error: TriptychError


@dataclass(frozen=True, slots=True)
class Resumed:
    """The pause of this number is over."""

    number: int


@dataclass(frozen=True, slots=True)
class PoolLost:
    """There is no text instance left: it ends what has not been sent to one yet."""

    error: TriptychError


@dataclass(frozen=True, slots=True)
class CallerLeft:
    """The client went away, or the process is told to end."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


RequestEvent = (
    Prepared
    | CreditsGranted
    | CreditsRefused
    | ItemEncoded
    | ItemFailed
    | LeaseGranted
    | LeaseFailed
    | LeasesDue
    | LeasesExtended
    | TextChosen
    | NoText
    | TextReady
    | FirstToken
    | TextFinished
    | TextFailed
    | Failed
    | Resumed
    | PoolLost
    | CallerLeft
    | DeadlinePassed
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WantCredits:
    """Ask the cluster for credits. ``wait`` only where nothing is held."""

    wants: tuple[Want, ...]
    wait: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Say Resumed after so long."""

    number: int
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class AbandonCredits:
    reason: str


@dataclass(frozen=True, slots=True)
class Encode:
    item: int
    credit: int
    encoder: str
    reader_lease: LeaseId
    router_lease: LeaseId
    lease_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Get a fresh reader's lease from the encoder that holds the item."""

    item: int
    credit: int
    encoder: str
    key: bytes
    generation: int
    lease_id: LeaseId
    lease_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Say LeasesDue after so long."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Extend:
    """Ask for more time for leases on an item; LeasesExtended follows if the first of them has it, nothing if not."""

    item: int
    credit: int
    encoder: str
    key: bytes
    generation: int
    lease_ids: tuple[LeaseId, ...]
    lease_s: float


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Choose a text instance outside ``avoid`` and send it the request."""

    attempt: int
    placements: tuple[Placement, ...]
    avoid: frozenset[str]
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel the call that runs for this credit, if it still does."""

    item: int
    credit: int
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give leases back, then the credit. ``credit`` is None where it went back before."""

    encoder: str
    credit: int | None
    lease_ids: tuple[LeaseId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class EmbeddingMissing:
    """The encoder does not have the embedding any more that it was believed to hold."""

    encoder: str
    content: Content


@dataclass(frozen=True, slots=True)
class End:
    """The request is over; ``error`` is None when it is done."""

    error: TriptychError | None


RequestEffect = (
    WantCredits
    | Pause
    | AbandonCredits
    | Encode
    | Renew
    | Alarm
    | Extend
    | Dispatch
    | Abort
    | Release
    | EmbeddingMissing
    | End
)
