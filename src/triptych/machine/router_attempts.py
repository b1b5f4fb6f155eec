"""The attempts of one request at routers: whether another one follows a failed one."""

from enum import Enum

from triptych.errors import InstanceLost, InvalidRequest, Overloaded, TriptychError, Unavailable

MOST_BREAKS = 4
"""Most times in a row that a request goes on after losing a router that sent none of the answer. Such a request may be
what kills them.

A part of an answer that kills a router kills the next one too before it sends more, as that goes through the same
tokens again.
"""
MOST_LOST = 16
"""Routers that one request goes on after, whatever they sent: as many as it survives drains of text instances."""
RETURN_S = 10.0
"""Time that a request looks for a router after it has lost one, seconds. The lost one may come back itself."""
RESTART_S = 3.0
"""Time that a request looks for one of several routers while some cannot be reached and the others are unavailable,
seconds.

That happens in a rolling restart: one drains or was just killed while the one that was restarted before it is not
connected yet.
"""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 0.5


class Next(Enum):
    """Next step after a failed attempt."""

    FAIL = "the request fails"
    OTHER = "a router that was not tried yet"
    ANY = "a router that was not tried yet, or after a pause any"


class RouterAttempts:
    """Owner of a request's attempts at routers.

    Three cases: a request that all routers refuse, or an only router that is not reached, is offered to each of them once. Where
    some of several are not reached, as when routers are restarted one by one, it is offered to all of them again for
    ``RESTART_S``. One that was sent and lost is offered to all of them again and again, until one takes it or ``RETURN_S`` has
    passed.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._lost = 0
        """Routers, of which the last ``_breaks`` sent nothing."""
        self._breaks = 0
        self.has_output = False
        """Whether some of the answer came in this attempt."""
        self._until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._refusal: Unavailable | None = None
        self._unreached = False
        """The connection to a router was refused."""
        self.tried: set[str] = set()
        """Addresses."""
        self.error: TriptychError | None = None
        """Why it looks for a router, while none has taken the request: the last one was lost, or refused it."""

    @property
    def was_sent(self) -> bool:
        """Whether a router that was lost had the request."""
        return self._lost > 0

    def left_s(self, now_s: float) -> float:
        return max(0.0, self._deadline_s - now_s)

    def progressed(self) -> None:
        """The answer, or more of it, has come from a router."""
        self.has_output = True
        self.error = None

    def failed(self, address: str, error: TriptychError, now_s: float, *, refused: bool, may_repeat: bool) -> Next:
        """An attempt has ended with an error. ``refused``: the router's connection is refused, so that it may not have been
        sent. ``may_repeat``: what is missing can be had from another router.
        """
        self.tried.add(address)
        had_output, self.has_output = self.has_output, False
        lost = isinstance(error, InstanceLost) and not error.sent_by_peer
        if not may_repeat:
            return Next.FAIL
        if lost and (had_output or not refused):
            self._lost += 1
            self._breaks = 0 if had_output else self._breaks + 1
            if self._breaks > MOST_BREAKS or self._lost > MOST_LOST:
                return Next.FAIL
            self.tried = {address}
            return self._any_until(now_s + RETURN_S, error)
        if had_output or (isinstance(error, InstanceLost) and not lost):  # it has had its attempts at text instances
            return Next.FAIL
        if self.error is not None:
            return Next.ANY if _is_refusal(error) else Next.FAIL
        return self._not_taken(error, now_s, unreached=lost) if isinstance(error, Unavailable) else Next.FAIL

    def _not_taken(self, error: Unavailable, now_s: float, *, unreached: bool) -> Next:
        if unreached:
            self._unreached = True
        else:
            self._refusal = error
        if not self._unreached or self._refusal is None:
            return Next.OTHER
        return self._any_until(now_s + RESTART_S, self._refusal)

    def _any_until(self, until_s: float, error: TriptychError) -> Next:
        self.error = error
        self._until_s, self._pause_s = min(until_s, self._deadline_s), _FIRST_PAUSE_S
        return Next.ANY

    def all_tried(self, error: Unavailable, now_s: float) -> Next:
        """Give up on this round: there is no other router after the last one failed with this error."""
        return self._any_until(now_s + RESTART_S, error) if self._unreached and len(self.tried) > 1 else Next.FAIL

    def pause_s(self, now_s: float) -> float | None:
        """Pause until all routers are tried again, seconds; None once it is enough."""
        if now_s >= self._until_s:
            return None
        self.tried.clear()
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return min(pause_s, self._until_s - now_s)


def _is_refusal(error: TriptychError) -> bool:
    """Whether it may go away. A router whose connection broke may still run the request for a moment."""
    runs_still = isinstance(error, InvalidRequest) and error.param == "request_id"
    return runs_still or isinstance(error, Unavailable | Overloaded)
