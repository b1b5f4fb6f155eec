"""Delay of a process and the shares of its callers, to refuse what it cannot look at in time."""

from collections import deque

from triptych.domain.limits import Seconds

_MOST_ACCEPTED = 4096
_BURST_S = 0.05
"""Requests that are let through at once, as a time."""


class SustainedDelay:
    """Owner of whether a process is behind: CoDel's rule (Nichols and Jacobson, ACM Queue 2012).

    It is behind once its delay has been above ``target_s`` for ``interval_s``, and no longer once the delay has been below for as long.
    A single pause, however long, does not count.
    """

    def __init__(self, target_s: Seconds, interval_s: Seconds) -> None:
        self._target_s = target_s
        self._interval_s = interval_s
        self._since_s: Seconds | None = None
        """Time of the first delay that contradicts ``behind``, without another since."""
        self.behind = False

    def measured(self, delay_s: Seconds, now_s: Seconds) -> bool:
        """Take a measurement. Returns whether ``behind`` has changed."""
        if (delay_s > self._target_s) == self.behind:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= self._interval_s:
            self._since_s = None
            self.behind = not self.behind
            return True
        return False


class Probing:
    """Owner of how many requests are let through that would else all be refused: ``times`` those that were accepted in the last
    ``window_s``, at least ``least_rate`` per second. If it ``remembers``, the window ends with the last one that was accepted.

    With none at all it would be found out too late that there is room again.
    """

    def __init__(self, times: float, least_rate: float, window_s: Seconds, *, remembers: bool = False) -> None:
        self._times = times
        self._least_rate = least_rate
        self._window_s = window_s
        self._remembers = remembers
        self._accepted: deque[Seconds] = deque(maxlen=_MOST_ACCEPTED)
        self._may_pass = 0.0
        self._at_s: Seconds = float("-inf")

    def accepted(self, now_s: Seconds) -> None:
        """Count one that was accepted."""
        self._accepted.append(now_s)
        if self._remembers:
            self._forget(now_s)

    def take(self, now_s: Seconds) -> bool:
        """Whether one more is let through."""
        if not self._remembers:
            self._forget(now_s)
        rate = max(self._least_rate, self._times * len(self._accepted) / self._window_s)
        self._may_pass = min(max(1.0, rate * _BURST_S), self._may_pass + rate * (now_s - self._at_s))
        self._at_s = now_s
        if self._may_pass < 1:
            return False
        self._may_pass -= 1
        return True

    def _forget(self, now_s: Seconds) -> None:
        while self._accepted and now_s - self._accepted[0] > self._window_s:
            self._accepted.popleft()


class Arrivals:
    """Owner of how many requests of each key came lately, and how many of all were let in.

    Lately is within the last ``window_s``, and up to as much before. A key that sends nothing for so long is forgotten.
    """

    def __init__(self, window_s: Seconds) -> None:
        self._window_s = window_s
        self._began_s = float("-inf")
        self._came: dict[str, float] = {}
        """Requests by key, each divided by the key's weight."""
        self._came_before: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        """Weights of the keys in either."""
        self._let_in = self._let_in_before = 0

    def admit(self, key: str, weight: float, now_s: Seconds) -> None:
        """Count a request that came and was not refused."""
        self._count(key, weight, now_s)
        self._let_in += 1

    def refused(self, key: str, weight: float, now_s: Seconds) -> None:
        """Count a request that came and was refused."""
        self._count(key, weight, now_s)

    def is_within_share(self, key: str, now_s: Seconds) -> bool:
        """Whether the key sends less than its part of what is let in, by weight. Never, if no other key sends anything."""
        self._turn(now_s)
        if key not in self._weights:
            return True
        share = (self._let_in + self._let_in_before) / sum(self._weights.values())
        return len(self._weights) > 1 and self._came.get(key, 0.0) + self._came_before.get(key, 0.0) < share

    def _count(self, key: str, weight: float, now_s: Seconds) -> None:
        self._turn(now_s)
        self._came[key] = self._came.get(key, 0.0) + 1 / weight
        self._weights[key] = weight

    def _turn(self, now_s: Seconds) -> None:
        """Begin a new window if the last one is over."""
        passed_s = now_s - self._began_s
        if passed_s < self._window_s:
            return
        lately = passed_s < 2 * self._window_s
        self._came_before, self._let_in_before = (self._came, self._let_in) if lately else ({}, 0)
        self._came, self._let_in, self._began_s = {}, 0, now_s
        self._weights = {key: self._weights[key] for key in self._came_before}
