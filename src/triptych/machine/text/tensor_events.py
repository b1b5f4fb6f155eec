"""What a reader's tensor cache is told, and what it says is to be done. Pulls are known by number."""

from dataclasses import dataclass

from triptych.domain.embedding import Ticket
from triptych.errors import TriptychError
from triptych.policy.queueing import Turn

Key = bytes
"""Whole digest of the identity of what a ticket leads to."""

Range = tuple[int, int]
"""(offset, nbytes)"""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """How a tensor set came here."""

    backend: str
    nbytes: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class CachedSlot:
    """A whole tensor set in the reader's own arena, laid out as its ticket says."""

    key: Key
    offset: int
    ticket: Ticket
    """The one it was pulled with."""
    stats: TransferStats | None
    """None where it was here, or on its way, before the request came."""


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acquire:
    """A request needs these tensor sets, one ticket each. Answer: Acquired (now or later), Waiting, Refused."""

    request_id: str
    tickets: tuple[Ticket, ...]
    turn: Turn
    """Who is let in first, and whose pulls go first."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pull is complete and verified."""

    pull_id: int
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class PullFailed:
    """``quarantined``: what ``Transport.quarantined()`` says now."""

    pull_id: int
    error: TriptychError
    quarantined: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave:
    """The request reads its tensor sets no more, whatever became of it. Unknown ids are fine.

    Until ``CopiesGone`` their bytes count as held elsewhere.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class CopiesGone:
    """What was copied of the request's tensor sets when it left is gone too. Unknown ids are fine."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. ``quarantined``: what ``Transport.quarantined()`` says now."""

    quarantined: tuple[Range, ...]


Event = Acquire | Pulled | PullFailed | Leave | CopiesGone | Tick

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartPull:
    """Pull and verify, now; ``Pulled`` or ``PullFailed`` must follow."""

    pull_id: int
    ticket: Ticket
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class Acquired:
    """Everything is there and stays until ``Leave``; one slot per ticket of the request, in its order."""

    request_id: str
    slots: tuple[CachedSlot, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """No room now: the request stands in line and holds nothing."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is not, or no longer, known here. TransferFailed names its tickets by their places."""

    request_id: str
    error: TriptychError


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Nothing reads through this ticket any more: give its lease back to its holder."""

    ticket: Ticket
    reason: str


@dataclass(frozen=True, slots=True)
class Evicted:
    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """``Tick`` is wanted at this time."""

    at_s: float
    reason: str


Effect = StartPull | Acquired | Waiting | Refused | ReleaseLease | Evicted | WakeAt
