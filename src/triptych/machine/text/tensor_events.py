"""Events and effects of a reader's tensor cache. Pulls are identified by number."""

from triptych.domain.embedding import Ticket
from triptych.domain.queue_position import QueuePosition
from triptych.domain.record import record
from triptych.errors import TriptychError

Key = bytes
"""Full digest of the identity of a ticket's content."""

Range = tuple[int, int]
"""(offset, nbytes)"""


@record
class TransferStats:
    """How a tensor set was pulled."""

    backend: str
    nbytes: int
    duration_s: float


@record
class CachedSlot:
    """A complete tensor set in the reader's own arena, in its ticket's layout."""

    key: Key
    offset: int
    ticket: Ticket
    """The ticket it was pulled with."""
    stats: TransferStats | None
    """None if it was present or being pulled before the request came."""


# --- events ----------------------------------------------------------------------------------------------------------


@record
class Acquire:
    """A request needs these tensor sets, one ticket each. Answered by Acquired (now or later), Waiting or TensorsRefused."""

    request_id: str
    tickets: tuple[Ticket, ...]
    queue_position: QueuePosition
    """Orders admission and pulls."""
    transient: bool = False
    """Whether they are read at once, by what runs already: they are admitted first, and nothing is held for them after ``ReaderLeft``."""


@record
class Pulled:
    """A pull is complete and verified."""

    pull_id: int
    stats: TransferStats


@record
class PullFailed:
    """``quarantined``: the current value of ``Transport.quarantined()``."""

    pull_id: int
    error: TriptychError
    quarantined: tuple[Range, ...] = ()


@record
class PullStopped:
    """A pull ended because of ``StopPull``. ``quarantined`` as in ``PullFailed``."""

    pull_id: int
    quarantined: tuple[Range, ...] = ()


@record
class ReaderLeft:
    """The request no longer reads its tensor sets. Unknown ids are ignored.

    Until ``CopiesGone`` their bytes count as held elsewhere.
    """

    request_id: str


@record
class CopiesGone:
    """The copies of the request's tensor sets are freed too. Unknown ids are ignored."""

    request_id: str


@record
class TensorTick:
    """Time has passed. ``quarantined``: the current value of ``Transport.quarantined()``."""

    quarantined: tuple[Range, ...]


Event = Acquire | Pulled | PullFailed | PullStopped | ReaderLeft | CopiesGone | TensorTick

# --- effects ---------------------------------------------------------------------------------------------------------


@record
class StartPull:
    """Pull and verify now; ``Pulled``, ``PullFailed`` or ``PullStopped`` must follow."""

    pull_id: int
    ticket: Ticket
    offset: int
    reason: str


@record
class StopPull:
    """No request needs this running pull any more: end it now, by ``PullStopped`` if it has not ended already."""

    pull_id: int
    reason: str


@record
class Acquired:
    """Everything is present until ``ReaderLeft``; one slot per ticket of the request, in order."""

    request_id: str
    slots: tuple[CachedSlot, ...]


@record
class WaitsForRoom:
    """No room now: the request is queued and holds nothing."""

    request_id: str
    reason: str


@record
class TensorsRefused:
    """The request is rejected or removed. TransferFailed names its tickets by index."""

    request_id: str
    error: TriptychError


@record
class ReleaseLease:
    """Nothing reads through this ticket any more: release its lease."""

    ticket: Ticket
    reason: str


@record
class TensorEvicted:
    key: Key
    reason: str


@record
class WakeAt:
    """Send ``TensorTick`` at this time."""

    at_s: float
    reason: str


Effect = StartPull | StopPull | Acquired | WaitsForRoom | TensorsRefused | ReleaseLease | TensorEvicted | WakeAt
