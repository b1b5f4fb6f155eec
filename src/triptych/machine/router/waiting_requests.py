"""Requests that wait for places, in the order in which they are served."""

from bisect import insort
from dataclasses import dataclass, replace
from math import inf
from typing import Generic, TypeVar

from triptych.domain.queue_position import QueuePosition
from triptych.machine.router.shared_events import CreditsWanted, TextWanted
from triptych.policy.queueing import longest_waits

Wanted = TypeVar("Wanted", CreditsWanted, TextWanted)


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Wanted]):
    wanted: Wanted
    since_s: float
    queue_position: QueuePosition


class WaitingRequests(Generic[Wanted]):
    """Part of ``machine.router.cluster.ClusterMachine``, which alone changes it."""

    def __init__(self) -> None:
        self.in_order: list[Waiting[Wanted]] = []
        """For reading."""
        self._lost_s = inf
        """When the first of them will be lost (``QueuePosition.at``), or before."""
        self._unplaceable: set[int] = set()
        """Requests that the encoders could not take even without load, since these have changed."""

    def add(self, wanted: Wanted, now_s: float) -> None:
        self._lost_s = min(self._lost_s, wanted.queue_position.lost_s)
        insort(self.in_order, Waiting(wanted, now_s, wanted.queue_position), key=lambda waiting: waiting.queue_position)

    def remove(self, request: int) -> None:
        """Without effect if it does not wait."""
        for place, entry in enumerate(self.in_order):  # mostly the first one
            if entry.wanted.request == request:
                del self.in_order[place]
                self._unplaceable.discard(request)
                return

    def put_lost_back(self, now_s: float) -> None:
        """Requests that cannot be served in time any more go behind those that can."""
        if now_s <= self._lost_s:
            return
        self.in_order = [replace(entry, queue_position=entry.queue_position.at(now_s)) for entry in self.in_order]
        self.in_order.sort(key=lambda waiting: waiting.queue_position)
        self._lost_s = min((entry.queue_position.lost_s for entry in self.in_order), default=inf)

    def longest_s(self, now_s: float) -> dict[int, float]:
        """By priority, for how long the first of them has waited (``policy.queueing``)."""
        return longest_waits((entry.queue_position.priority, now_s - entry.since_s) for entry in self.in_order)

    def cannot_be_placed(self, request: int) -> None:
        """The instances could not take it even without load."""
        self._unplaceable.add(request)

    def is_known_unplaceable(self, request: int) -> bool:
        return request in self._unplaceable

    def encoders_changed(self) -> None:
        """Note that each request may be placed now."""
        self._unplaceable.clear()

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        assert self._unplaceable <= {entry.wanted.request for entry in self.in_order}, "unplaceable but gone"
