"""Time until there is room again under a limit that is reached, by how fast room has been freed lately."""

from collections import deque

LEAST_S = 1.0
"""Retry-After has whole seconds ..."""
LONGEST_S = 60.0
"""Longest wait that is named, seconds. Clients commonly ignore a longer one."""
_REMEMBERED_S = 30.0
_MOST = 256
"""Times at which room was freed that are remembered."""
_MOST_CALLERS = 1024


class Turnover:
    """Owner of what is known of one limit: of requests, or of bytes."""

    def __init__(self) -> None:
        self._freed: deque[tuple[float, int]] = deque(maxlen=_MOST)
        """Times at which room was freed, and how much."""
        self._amount = 0
        """Sum of all of it."""
        self._told_s: dict[str, float] = {}
        """Time, by caller, when there is a place for all of its requests that were refused."""

    def free(self, amount: int, now_s: float) -> None:
        """A request that had so much of the limit is over."""
        if not amount:
            return
        if len(self._freed) == _MOST:
            self._amount -= self._freed[0][1]
        self._freed.append((now_s, amount))
        self._amount += amount

    def rest(self) -> None:
        """Forget what was named: there is much room, so whoever was refused may come."""
        self._told_s.clear()

    def after_s(self, amount: int, now_s: float) -> float:
        """Time until so much is freed, within bounds, seconds."""
        return _within_bounds(self._takes_s(amount, now_s))

    def refuse(self, caller: str, now_s: float) -> float:
        """A request is refused a place. Returns after how many seconds there will be one for it, within bounds: behind the caller's own
        that were refused before, while others that do not wait have no effect.
        """
        takes_s = self._takes_s(1, now_s)
        if not takes_s:
            return LEAST_S
        if caller not in self._told_s and len(self._told_s) >= _MOST_CALLERS:
            self._told_s.clear()
        told_s = min(max(self._told_s.get(caller, now_s), now_s) + takes_s, now_s + LONGEST_S)
        self._told_s[caller] = told_s
        return _within_bounds(told_s - now_s)

    def _takes_s(self, amount: int, now_s: float) -> float:
        """0 if it is unknown."""
        while self._freed and now_s - self._freed[0][0] > _REMEMBERED_S:
            self._amount -= self._freed.popleft()[1]
        if not self._freed:
            return 0.0
        return amount * max(LEAST_S, now_s - self._freed[0][0]) / self._amount


def _within_bounds(wait_s: float) -> float:
    return min(max(LEAST_S, wait_s), LONGEST_S)
