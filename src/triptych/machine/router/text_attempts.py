"""A request's attempts at text instances."""

from dataclasses import dataclass

from triptych.errors import (
    EngineFailure,
    InstanceLost,
    LeaseLost,
    Overloaded,
    StageClosed,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.shared_events import Grant

MOST_DRAINED = 16
"""Attempts that end because their instance drains, or has switched, and do not count: more than an answer lives through in a rolling
restart. As many that end with a hand-over do not count either."""


@dataclass(slots=True)
class TextAttempts:
    """Part of ``machine.router.request.RequestMachine``, which alone changes it."""

    most: int
    sent: int = 0
    expired: int = 0
    """Attempts that ended because leases expired in the text instance's queue."""
    drained: int = 0
    """Attempts that ended because their instance drained or switched."""
    handed_over: int = 0
    """Attempts that ended with a hand-over, as they should."""
    moved: int = 0
    """Attempts that ended as the request went elsewhere before it had a token."""
    refusals: int = 0
    """Times that no instance was available."""
    current: Grant | None = None
    """The current attempt's grant, if any."""
    avoid: frozenset[str] = frozenset()
    error: TriptychError | None = None
    """Why the last attempt failed, for the client if there is no further one."""
    _engine_failed: bool = False

    @property
    def dispatches(self) -> int:
        """Attempts, where one that hands over and the next are one."""
        return self.sent - self.handed_over - self.moved

    @property
    def hands_over(self) -> bool:
        """Whether the current attempt is to compute the prompt only."""
        return self.current is not None and self.current.hands_over

    @property
    def counted(self) -> int:
        """Attempts that count against ``most``."""
        return self.dispatches - self.expired - self.drained

    def has(self, credit: int) -> bool:
        """Whether this credit belongs to the current attempt."""
        return self.current is not None and self.current.credit == credit

    def send(self, grant: Grant) -> None:
        self.current = grant
        self.sent += 1

    def wait(self) -> None:
        """No instance is usable: the next that is may be one that the request was lost at."""
        self.refusals += 1
        self.avoid = frozenset()

    def expire(self, error: TriptychError) -> None:
        """The leases expired while the request was queued: retry with new leases, without counting the attempt."""
        self.current, self.error = None, error
        self.expired += 1

    def move(self) -> None:
        """The current attempt has ended, as the request waits elsewhere."""
        self.current, self.error = None, None
        self.moved += 1

    def hand_over(self) -> bool:
        """The current attempt has ended with a hand-over. Returns whether another may follow."""
        if self.handed_over < MOST_DRAINED:
            self.handed_over += 1
        self.current, self.error = None, None
        return self.counted < self.most

    def fail(self, error: TriptychError, *, drains: bool = False) -> bool:
        """Record a failed attempt. Returns whether another may follow.

        One whose instance ``drains`` does not count, and the instance is not avoided once it is back; nor does one whose instance has
        switched, which is avoided.
        """
        retryable = isinstance(error, Unavailable | Overloaded | LeaseLost)
        if isinstance(error, EngineFailure):
            retryable = not self._engine_failed
            self._engine_failed = True
        name = self.current.name if self.current is not None else ""
        switched = isinstance(error, StageClosed)
        lost = isinstance(error, Unavailable) and not isinstance(error, TransferFailed) and not switched
        excused = (switched or (lost and drains)) and self.drained < MOST_DRAINED
        self.drained += excused
        if switched or not (excused or isinstance(error, TransferFailed | LeaseLost)):
            self.avoid |= {name}
        if lost:
            instance_id = self.current.instance_id if self.current is not None else ""
            error = InstanceLost(f"text instance {instance_id} was lost while it worked on the request")
        self.current, self.error = None, error
        return retryable and self.counted < self.most
