"""A queue in the order of queue positions, at a cost that hardly grows with its length."""

from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar

from triptych.domain.queue_position import QueuePosition


class Queued(Protocol):
    """What waits in a line."""

    @property
    def position(self) -> QueuePosition: ...


T = TypeVar("T", bound=Queued)


class Line(Generic[T]):
    """Owner of what waits. Entries are told apart by identity."""

    def __init__(self) -> None:
        self._numbers = count()
        self._valid: dict[T, int] = {}
        """By entry, the number under which it is in ``_order``; there are others of before."""
        self._order: list[tuple[QueuePosition, int, T]] = []
        self._lost: list[tuple[float, int, T]] = []
        """When an entry is lost, and so gets another position."""

    def __len__(self) -> int:
        return len(self._valid)

    def add(self, entry: T, now_s: float) -> None:
        number, position = next(self._numbers), entry.position
        self._valid[entry] = number
        if now_s > position.lost_s:
            position = position.at(now_s)
        elif position.lost_s < inf:
            heappush(self._lost, (position.lost_s, number, entry))
        heappush(self._order, (position, number, entry))

    def remove(self, entry: T) -> bool:
        """Returns whether it was there."""
        return self._valid.pop(entry, None) is not None

    def first(self, now_s: float) -> T | None:
        """What is next; None if nothing waits."""
        lost, order, valid = self._lost, self._order, self._valid
        while lost and lost[0][0] < now_s:
            _, number, entry = heappop(lost)
            if valid.get(entry) == number:
                self.add(entry, now_s)
        while order:
            _, number, entry = order[0]
            if valid.get(entry) == number:
                return entry
            heappop(order)
        return None

    def pop(self, now_s: float) -> T | None:
        """Take out what is next; None if nothing waits."""
        if (entry := self.first(now_s)) is not None:
            heappop(self._order)
            del self._valid[entry]
        return entry
