"""The queue positions of requests that a text engine has and has not begun, which change once: when it is too late for them."""

from heapq import heapify, heappop, heappush
from math import inf

from triptych.domain.queue_position import QueuePosition

_SPARE = 64
"""Entries of the heap that are tolerated for requests that have begun or gone, besides as many as wait."""


class UnbegunPositions:
    """Owner of these positions, by request."""

    def __init__(self) -> None:
        self.by_request: dict[str, QueuePosition] = {}
        """For reading."""
        self._lost_at: list[tuple[float, str]] = []
        """A heap of when these cannot be served in time any more. Some may have begun or gone since."""

    @property
    def next_lost_s(self) -> float:
        """None is lost before that time; some may have begun or gone."""
        return self._lost_at[0][0] if self._lost_at else inf

    def add(self, request_id: str, queue_position: QueuePosition) -> None:
        self.by_request[request_id] = queue_position
        heappush(self._lost_at, (queue_position.lost_s, request_id))

    def discard(self, request_id: str) -> None:
        """Drop a request that has begun, or is gone."""
        self.by_request.pop(request_id, None)

    def lost(self, now_s: float) -> list[tuple[str, QueuePosition]]:
        """The new positions of those that cannot be served in time any more, each once."""
        if len(self._lost_at) > 2 * len(self.by_request) + _SPARE:
            self._lost_at = [
                (queue_position.lost_s, request_id) for request_id, queue_position in self.by_request.items()
            ]
            heapify(self._lost_at)
        lost: list[tuple[str, QueuePosition]] = []
        while self._lost_at and self._lost_at[0][0] < now_s:
            _, request_id = heappop(self._lost_at)
            queue_position = self.by_request.get(request_id)
            if queue_position is not None and queue_position.lost_s < now_s:
                self.by_request[request_id] = queue_position.at(now_s)
                lost.append((request_id, self.by_request[request_id]))
        return lost
