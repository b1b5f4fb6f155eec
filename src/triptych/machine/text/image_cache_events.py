"""What a text instance's image cache is told, and what it says is to be done. Pulls are known by number."""

from dataclasses import dataclass

from triptych.domain.embedding import Ticket
from triptych.errors import TriptychError

Key = bytes
"""Whole digest of an embedding's identity."""

Range = tuple[int, int]
"""(offset, nbytes)"""


@dataclass(frozen=True, slots=True)
class CachedSlot:
    """A whole embedding in the reader's own arena, laid out as its ticket says."""

    key: Key
    offset: int
    ticket: Ticket
    """The one it was pulled with."""


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acquire:
    """A request needs these embeddings, one ticket per item. Answer: Acquired (now or later), Waiting, Refused."""

    request_id: str
    tickets: tuple[Ticket, ...]
    deadline_s: float = 0.0
    """Who is let in first, and whose pulls go first; among equals, who came first."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pull is complete and verified."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class PullFailed:
    """``quarantined``: what ``Transport.quarantined()`` says now."""

    pull_id: int
    error: TriptychError
    quarantined: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave:
    """The request needs its embeddings no more, whatever became of it. Unknown ids are fine."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. ``quarantined``: what ``Transport.quarantined()`` says now."""

    quarantined: tuple[Range, ...]


Event = Acquire | Pulled | PullFailed | Leave | Tick

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartPull:
    """Pull and verify; ``Pulled`` or ``PullFailed`` must follow. ``deadline_s`` is of the request that it is for."""

    pull_id: int
    ticket: Ticket
    offset: int
    request_id: str
    deadline_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Hastened:
    """A more urgent request needs what is being pulled."""

    pull_id: int
    request_id: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Unneeded:
    """Who needed it has left: if nothing of it has begun and it is not ``needed`` again, ``PullFailed`` may follow."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """Everything is there and stays until ``Leave``; one slot per ticket of the request, in its order."""

    request_id: str
    slots: tuple[CachedSlot, ...]
    hits: tuple[bool, ...]
    """Whether each was there, or on its way, before the request came."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """No room now: the request stands in line and holds nothing."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is not, or no longer, known here. TransferFailed names the items."""

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


Effect = StartPull | Hastened | Unneeded | Acquired | Waiting | Refused | ReleaseLease | Evicted
