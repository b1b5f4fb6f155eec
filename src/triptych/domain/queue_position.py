"""Where a call goes in the queues of an instance."""

from triptych.domain.record import record


@record
class QueuePosition:
    """What orders calls of one priority. Durations in seconds from when the call is sent, as clocks differ between processes.

    The instance makes a ``policy.queueing.Turn`` of it, on its own clock.
    """

    due_in_s: float | None = None
    """Time left until it is due; negative if overdue. None: at the call's time limit."""
    lost_in_s: float | None = None
    """Time left to begin; after that it goes behind what is not lost. None if it is never too late."""
    aged_in_s: float | None = None
    """Time left until it is due again if it is lost. None if the caller does not say."""
    behind_s: float = 0.0
    """How much later than that it counts as having come, as its tenant is ahead of its share; negative for earlier."""


BY_TIME_LIMIT = QueuePosition()
