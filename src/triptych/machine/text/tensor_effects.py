"""Effects of a reader's tensor cache. Pulls are identified by number."""

from triptych.domain.embedding import HolderRef, Ticket
from triptych.domain.record import record
from triptych.errors import TriptychError

Key = bytes
"""Full digest of the identity of a ticket's content."""

Range = tuple[int, int]
"""(offset, nbytes)"""


@record
class CachedSlot:
    """A complete tensor set in the reader's own arena, in its ticket's layout."""

    offset: int
    ticket: Ticket
    """The ticket it was pulled with."""
    backend: str = ""
    """By which it was pulled; empty if it was present or being pulled before the request came."""
    duration_s: float = 0.0
    """Of that pull, seconds."""

    @property
    def pulled_nbytes(self) -> int:
        """Bytes pulled for the request."""
        return self.ticket.slot_nbytes if self.backend else 0


@record
class StartPull:
    """Pull and verify now; ``pulled``, ``pull_failed`` or ``pull_stopped`` must follow."""

    pull_id: int
    ticket: Ticket
    holder: HolderRef
    offset: int
    reason: str


@record
class StopPull:
    """No request needs this running pull any more: end it now, by ``pull_stopped`` if it has not ended already."""

    pull_id: int
    reason: str


@record
class Acquired:
    """Everything is present until ``leave``; one slot per ticket of the request, in order."""

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
class TensorEvicted:
    key: Key
    reason: str


@record
class WakeAt:
    """Call ``tick`` at this time."""

    at_s: float
    reason: str


Effect = StartPull | StopPull | Acquired | WaitsForRoom | TensorsRefused | Ticket | TensorEvicted | WakeAt
"""A ticket is one that nothing reads through any more: its lease is to be released."""
