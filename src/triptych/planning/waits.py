"""Waiting times of queues in closed form: M/G/1 by Pollaczek and Khinchine, and several servers by Sakasegawa's approximation."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

_ALIKE = 1e-6
"""Rates that differ by less than this share count as equal."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A waiting time: ``share`` of the customers wait, for ``mean_s`` on average over all of them, exponentially."""

    share: float
    mean_s: float

    @property
    def rate(self) -> float:
        """Of the exponential time of those that wait."""
        return self.share / self.mean_s if self.mean_s else inf

    def then(self, other: "Wait") -> "Wait":
        """Both, one after the other, as one wait of the same mean."""
        return Wait(1 - (1 - self.share) * (1 - other.share), self.mean_s + other.mean_s)


NO_WAIT = Wait(0.0, 0.0)
ENDLESS = Wait(1.0, inf)


def wait(per_s: float, mean_s: float, square_s2: float, *, servers: float = 1.0, burstiness: float = 1.0) -> Wait:
    """Wait of ``per_s`` customers per second for servers that take ``mean_s`` each, ``square_s2`` in the mean square.

    ``burstiness``: the squared coefficient of variation of the gaps between arrivals. With one server and Poisson arrivals the mean is
    exact. ``servers`` need not be a whole number.
    """
    if not per_s or not mean_s:
        return NO_WAIT
    utilization = per_s * mean_s / servers
    if utilization >= 1:
        return ENDLESS
    waiting = utilization ** (sqrt(2 * (servers + 1)) - 1)
    variation = max(0.0, burstiness + square_s2 / mean_s**2 - 1) / 2
    return Wait(waiting, variation * waiting * mean_s / (servers * (1 - utilization)))


def within(limit_s: float, first: Wait, second: Wait = NO_WAIT) -> float:
    """The probability that both waits together are at most ``limit_s``; they are taken to be independent."""
    if limit_s < 0 or inf in (first.mean_s, second.mean_s):
        return 0.0
    one, other = first.rate, second.rate
    later = first.share * (1 - second.share) * _tail(one, limit_s) + second.share * (1 - first.share) * _tail(
        other, limit_s
    )
    if both := first.share * second.share:
        if inf in (one, other):
            both_later = _tail(min(one, other), limit_s)
        elif abs(one - other) <= _ALIKE * max(one, other):
            both_later = (1 + one * limit_s) * exp(-one * limit_s)
        else:
            both_later = (other * exp(-one * limit_s) - one * exp(-other * limit_s)) / (other - one)
        later += both * both_later
    return 1 - later


def _tail(rate: float, limit_s: float) -> float:
    return 0.0 if rate == inf else exp(-rate * limit_s)


def moments(shares: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Mean and mean square."""
    mean = square = 0.0
    for share, value in zip(shares, values, strict=True):
        mean += share * value
        square += share * value * value
    return mean, square
