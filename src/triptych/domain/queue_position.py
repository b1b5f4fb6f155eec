"""Where a request stands in every queue (requests, pulls, sequences, items)."""

from math import inf
from typing import NamedTuple

from triptych.domain.record import record

AGEING_S = 30.0
"""A request that has waited this long is not overtaken by later arrivals of its priority."""


@record
class RelativeQueuePosition:
    """Order among calls of one priority. Durations in seconds from when the call is sent, as clocks differ between processes.

    The instance makes a ``QueuePosition`` of it, on its own clock (``policy.queueing.as_called``).
    """

    due_in_s: float | None = None
    """Time left until it is due; negative if overdue. None: at the call's time limit."""
    lost_in_s: float | None = None
    """Time left to begin; after that it goes behind what is not lost. None if it is never too late."""
    aged_in_s: float | None = None
    """Time left until it is due again if it is lost. None if the caller does not say."""
    behind_s: float = 0.0
    """How much later than that it counts as having come, as its tenant is ahead of its share; negative for earlier."""


BY_TIME_LIMIT = RelativeQueuePosition()


class QueuePosition(NamedTuple):
    """A queue position; the smallest goes first.

    The lower priority number goes first, as in vLLM, regardless of what is due: a higher number may starve until its
    own deadline. Within a priority what is due earlier goes first, but nothing counts as due later than ``AGEING_S``
    after arrival, so nothing is overtaken by requests that arrived ``AGEING_S`` after it. Ties go in order of arrival.

    What cannot be served in time any more goes behind what still can (``at``), else every request of an overloaded
    queue would be served just too late.
    """

    priority: int
    due_s: float
    arrival: int
    lost_s: float = inf
    """After this time it is too late to begin."""
    aged_s: float = inf
    """The ``due_s`` from then on."""
    behind_s: float = 0.0
    """How much later all that is than the request's own objective, because of its tenant's share (``policy.fairness``)."""

    @property
    def beyond_share(self) -> bool:
        """Whether its tenant's share had no room for it: then it is about ``AGEING_S`` behind, less what the stage was late."""
        return self.behind_s > AGEING_S / 2

    def behind(self, by_s: float, *, within: bool = False) -> "QueuePosition":
        """The position of a request that counts as having come so much later, or earlier if negative.

        ``within``: of one within its tenant's share, which is never lost, as it would go behind what is beyond the shares of others.
        """
        if not by_s and not within:
            return self
        lost_s = inf if within else self.lost_s + max(0.0, by_s)
        return QueuePosition(
            self.priority, self.due_s + by_s, self.arrival, lost_s, self.aged_s + by_s, self.behind_s + by_s
        )

    def at(self, now_s: float) -> "QueuePosition":
        """The position at this time. It changes once, to a later one."""
        if now_s <= self.lost_s:
            return self
        return QueuePosition(self.priority, self.aged_s, self.arrival, behind_s=self.behind_s)

    def relative(self, now_s: float) -> RelativeQueuePosition:
        """The same for an instance: what is left by the request's own objective, and how far its tenant's share puts it behind."""
        behind_s = self.behind_s
        return RelativeQueuePosition(
            self.due_s - behind_s - now_s,
            None if self.lost_s == inf else self.lost_s - max(0.0, behind_s) - now_s,
            None if self.aged_s == inf else self.aged_s - behind_s - now_s,
            behind_s,
        )


FIRST_COME = QueuePosition(0, 0.0, 0)
"""The same for all, so that they go in order of arrival."""
