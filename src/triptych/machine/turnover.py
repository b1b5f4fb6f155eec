"""When there will be room again under a limit that is reached: by how fast room has been freed lately, behind those that were told before."""

from collections import deque
from math import inf

LEAST_S = 1.0
"""Retry-After has whole seconds ..."""
LONGEST_S = 60.0
"""... and clients commonly ignore a longer one."""
_REMEMBERED_S = 30.0
_MOST = 256
"""Times at which room was freed that are remembered."""


class Turnover:
    """Owner of what is known of one limit: of requests, or of bytes."""

    def __init__(self) -> None:
        self._freed: deque[tuple[float, int]] = deque(maxlen=_MOST)
        """When how much was freed."""
        self._amount = 0
        """All of it."""
        self._told_s = -inf
        """When there is room for all that were refused."""

    def free(self, amount: int, now_s: float) -> None:
        """A request that had so much of the limit is over."""
        if not amount:
            return
        if len(self._freed) == _MOST:
            self._amount -= self._freed[0][1]
        self._freed.append((now_s, amount))
        self._amount += amount

    def refuse(self, amount: int, now_s: float) -> float:
        """A request that needs so much is refused. Returns after how many seconds there will be room for it, within bounds."""
        while self._freed and now_s - self._freed[0][0] > _REMEMBERED_S:
            self._amount -= self._freed.popleft()[1]
        if not self._freed:
            return LEAST_S
        per_s = self._amount / max(LEAST_S, now_s - self._freed[0][0])
        self._told_s = min(max(self._told_s, now_s) + amount / per_s, now_s + LONGEST_S)
        return min(max(LEAST_S, self._told_s - now_s), LONGEST_S)  # it is rounded
