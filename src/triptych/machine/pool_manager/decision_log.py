"""The last decisions on one pool, and what came of them."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from triptych.domain.decision import DecisionOutcome, DecisionRecord


@dataclass(slots=True)
class _Entry:
    at_s: float
    record: DecisionRecord


class DecisionLog:
    """Keeps the last ``most`` records. Numbers rise, also over changes of the leader (``resume``)."""

    def __init__(self, most: int) -> None:
        self._entries: deque[_Entry] = deque(maxlen=most)
        self._number = 0

    def next_number(self) -> int:
        """Of the next decision or order."""
        self._number += 1
        return self._number

    def add(self, record: DecisionRecord, now_s: float) -> None:
        self._entries.append(_Entry(now_s, record))

    def close(self, number: int, outcome: DecisionOutcome, detail: str) -> DecisionRecord | None:
        """What came of a decision; None if that is known already, or the decision is not."""
        for one in self._entries:
            open_ = one.record.outcome in (DecisionOutcome.PENDING, DecisionOutcome.TIMED_OUT)
            if one.record.number == number and open_:
                one.record = replace(one.record, outcome=outcome, detail=detail)
                return one.record
        return None

    def replace_pending(self, detail: str) -> list[DecisionRecord]:
        """End all decisions of which nothing came yet."""
        pending = [one for one in self._entries if one.record.outcome is DecisionOutcome.PENDING]
        for one in pending:
            one.record = replace(one.record, outcome=DecisionOutcome.REPLACED, detail=detail)
        return [one.record for one in pending]

    def resume(self, records: Sequence[DecisionRecord], ages_s: Mapping[int, float], now_s: float) -> None:
        """Go on from the records of another leader, oldest first; ``ages_s`` by number."""
        self._entries.clear()
        self._entries.extend(_Entry(now_s - ages_s.get(one.number, 0.0), one) for one in records)
        self._number = max(self._number, *(one.number for one in records))

    def records(self, now_s: float) -> tuple[DecisionRecord, ...]:
        """Oldest first."""
        return tuple(replace(one.record, age_s=now_s - one.at_s) for one in self._entries)
