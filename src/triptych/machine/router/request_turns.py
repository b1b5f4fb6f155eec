"""The positions of one request in the queues of all services."""

from dataclasses import dataclass
from math import inf

from triptych.domain.slo import NOTHING_EXPECTED, Expected
from triptych.policy.fairness import UNSHARED, Share
from triptych.policy.policies import Ordering
from triptych.policy.queueing import FIRST_COME, Turn


@dataclass(slots=True)
class RequestTurns:
    """Part of ``machine.router.request.RequestMachine``, which alone changes it."""

    ordering: Ordering
    number: int
    """It grows with the arrivals."""
    priority: int
    arrived_s: float
    deadline_s: float
    expected: Expected = NOTHING_EXPECTED
    share: Share = UNSHARED
    """Its tenant's, of the encoders."""
    encode: Turn = FIRST_COME
    """In the queues of encoders, as of the last time that it wanted places there ..."""
    text: Turn = FIRST_COME
    """... and in those of text instances."""

    def wants_encoders(self, *, begun: bool) -> Turn:
        """``begun``: its first token has been sent."""
        alone = self.expected.isolated
        turn = self.share.of(self._turn(0.0 if alone is None else alone.prefill_s + alone.encode_s))
        self.encode = turn._replace(lost_s=inf) if begun else turn  # what has begun is never too late to begin
        return self.encode

    def wants_text(self, *, begun: bool) -> Turn:
        """All of its items are encoded, or enough of them to begin with."""
        alone = self.expected.isolated
        turn = self._turn(0.0 if alone is None else alone.prefill_s)
        self.text = turn._replace(lost_s=inf) if begun else turn
        return self.text

    def _turn(self, needs_s: float) -> Turn:
        limit_s = self.expected.ttft_limit_s
        return self.ordering(
            priority=self.priority,
            deadline_s=self.deadline_s,
            arrived_s=self.arrived_s,
            arrival=self.number,
            due_s=inf if limit_s is None else self.arrived_s + limit_s,
            needs_s=needs_s,
        )
