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
        """Number of the next decision or order."""
        self._number += 1
        return self._number

    def add(self, record: DecisionRecord, now_s: float) -> None:
        self._entries.append(_Entry(now_s, record))

    def close(self, number: int, outcome: DecisionOutcome, detail: str) -> DecisionRecord | None:
        """Record the outcome of a decision. None if that is known already, or the decision is not."""
        for entry in self._entries:
            open_ = entry.record.outcome in (DecisionOutcome.PENDING, DecisionOutcome.TIMED_OUT)
            if entry.record.number == number and open_:
                entry.record = replace(entry.record, outcome=outcome, detail=detail)
                return entry.record
        return None

    def replace_pending(self, detail: str) -> list[DecisionRecord]:
        """End all decisions of which nothing came yet."""
        pending = [entry for entry in self._entries if entry.record.outcome is DecisionOutcome.PENDING]
        for entry in pending:
            entry.record = replace(entry.record, outcome=DecisionOutcome.REPLACED, detail=detail)
        return [entry.record for entry in pending]

    def resume(self, records: Sequence[DecisionRecord], ages_s: Mapping[int, float], now_s: float) -> None:
        """Go on from the records of another leader, oldest first; ``ages_s`` by number."""
        self._entries.clear()
        self._entries.extend(_Entry(now_s - ages_s.get(record.number, 0.0), record) for record in records)
        self._number = max(self._number, *(record.number for record in records))

    def records(self, now_s: float) -> tuple[DecisionRecord, ...]:
        """Oldest first."""
        return tuple(replace(entry.record, age_s=now_s - entry.at_s) for entry in self._entries)
