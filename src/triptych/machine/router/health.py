"""The health of an instance at one stage: failures in a row, its backoff, and its return.


    WELL -- too many failures in a row --> BACKOFF -- its time is over --> PROBATION -- a success --> WELL
                                              ^----------- a failure ----------+

In backoff it gets no work while there is another instance. On probation it gets one item or request at a time. Each
backoff is twice as long as the one before. What counts as success depends on the reason: an instance that encodes
quickly and wrongly is not well because a call succeeded.
"""

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from triptych.policy.ejection import ejection_s


class BackoffReason(Enum):
    """Why an instance is in backoff or on probation."""

    ENGINE = "its engine fails"
    CALLS = "calls to it break"
    EMBEDDINGS = "its embeddings cannot be used"
    LATENCY = "it is far slower than the others"


@dataclass(slots=True)
class Health:
    """Part of ``machine.router.instance.Instance``."""

    reason: BackoffReason | None = None
    """None while it is well."""
    until_s: float = -inf
    """End of the backoff."""
    backoffs: int = 0
    """In a row."""
    probes: set[int] = field(default_factory=set)
    """The running credits that were granted on probation."""
    failures: dict[BackoffReason, int] = field(default_factory=dict)
    """In a row."""

    def in_backoff(self, now_s: float) -> bool:
        return now_s < self.until_s

    def on_probation(self, now_s: float) -> bool:
        return self.reason is not None and now_s >= self.until_s

    def failed(self, reason: BackoffReason, most: int, now_s: float) -> bool:
        """Count a failure. Returns whether a backoff is due: at ``most`` in a row, and at once on probation.

        None is due during a backoff, as one failed batch fails many requests.
        """
        failures = self.failures[reason] = self.failures.get(reason, 0) + 1
        return not self.in_backoff(now_s) and (failures >= most or self.reason is not None)

    def back_off(self, reason: BackoffReason, now_s: float, *, first_s: float, longest_s: float) -> float:
        """Start a backoff. Returns its length in seconds."""
        length_s = ejection_s(self.backoffs, first_s=first_s, longest_s=longest_s)
        self.reason, self.until_s = reason, now_s + length_s
        self.backoffs += 1
        return length_s

    def worked(self, *reasons: BackoffReason) -> bool:
        """Note that something has succeeded which would fail under any of these. Returns whether the instance has become well."""
        for reason in reasons:
            self.failures.pop(reason, None)
        if self.reason is None or self.reason not in reasons:
            return False
        self.reason, self.until_s, self.backoffs = None, -inf, 0
        return True
