"""The sequences of the text engine that have no blocks, in the order of their queue positions.

Sums are kept, as they are asked for at each step and many may wait. Each request has few sequences here: one, or one per choice that has begun.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from triptych.domain.queue_position import QueuePosition
from triptych.machine.text.sequence import Sequence

S = TypeVar("S", bound=Sequence)


class WaitingLine(Generic[S]):
    """Part of ``machine.text.running_batch.RunningBatch``. Followers wait with their leader, and are not told apart here."""

    def __init__(self) -> None:
        self._line: list[S] = []
        self._of: dict[str, list[S]] = {}
        """By request."""
        self._counted: dict[S, int] = {}
        """The pending tokens of each, as of ``recount``."""
        self.pending_tokens = 0
        """Of all together."""

    def __iter__(self) -> Iterator[S]:
        return iter(self._line)

    def __contains__(self, sequence: S) -> bool:
        return sequence in self._counted

    @property
    def requests(self) -> frozenset[str]:
        return frozenset(self._of)

    def of(self, request_id: str) -> tuple[S, ...]:
        """Sequences of a request that wait."""
        return tuple(self._of.get(request_id, ()))

    def add(self, sequence: S) -> None:
        insort(self._line, sequence, key=order)
        self._of.setdefault(sequence.request_id, []).append(sequence)
        self._counted[sequence] = 0
        self.recount(sequence)

    def remove(self, sequence: S) -> None:
        """Of one that waits, before its queue position changes."""
        del self._line[bisect_left(self._line, order(sequence), key=order)]
        others = self._of[sequence.request_id]
        others.remove(sequence)
        if not others:
            del self._of[sequence.request_id]
        self.pending_tokens -= self._counted.pop(sequence)

    def recount(self, sequence: S) -> None:
        """Count a sequence again: its pending tokens, or its followers, may have changed."""
        before, self._counted[sequence] = self._counted[sequence], sequence.pending_tokens
        self.pending_tokens += self._counted[sequence] - before

    def reorder(self, sequence: S, queue_position: QueuePosition) -> None:
        """Give one that waits another queue position, and its followers."""
        self.remove(sequence)
        for other in (sequence, *sequence.followers):
            other.queue_position = queue_position
        self.add(sequence)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        line = self._line
        assert line == sorted(line, key=order), "out of order"
        assert set(line) == set(self._counted), "a sequence is counted that does not wait"
        by_request = {sequence for found in self._of.values() for sequence in found}
        assert by_request == set(line), "requests differ"
        assert all(self._of.values()), "a request without a sequence"
        assert self.pending_tokens == sum(sequence.pending_tokens for sequence in line), "pending tokens do not add up"


def order(sequence: Sequence) -> tuple[QueuePosition, int, int]:
    return sequence.order
