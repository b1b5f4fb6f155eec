"""How long encodes take: their 99th percentile in the pool, and how slow each encoder is beside the others.

A time counts at the router, from the grant to the answer: queue, preprocessing, batch and network. It depends on the
item's size, hence a percentile for each power of two of tokens. How slow an encoder is must not depend on how much it
has been given: each of its times is divided by the pool's mean for equally many pending tokens.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, log2

from triptych.policy.ejection import is_outlier

ENOUGH = 100
"""Encodes of a size before their percentile is used."""
_SHARE = 0.99
_LEAST_S = 1e-4
_BUCKETS_PER_DOUBLING = 8
_BUCKETS = 24 * _BUCKETS_PER_DOUBLING
_FADING_AT = 1000.0
_ENOUGH_TO_COMPARE = 8
"""Encodes with as many pending tokens before a mean is used, and of an encoder before it is called slow."""
_MEAN_WEIGHT, _SLOWNESS_WEIGHT = 0.02, 0.1
"""Least weight of a new value: older ones fade."""
_MOST_RELATIVE = 20.0
"""What counts of a time, so that one item that needs much preprocessing makes no encoder slow."""


@dataclass(slots=True)
class Tail:
    """The 99th percentile of recent times in seconds, from above and within 9 %.

    A histogram with logarithmic buckets from 0.1 ms to half an hour. It is halved at 1,000 values, so older ones fade.
    """

    seen: int = 0
    _counts: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    _total: float = 0.0
    _value_s: float = inf
    _stale: bool = True

    def observe(self, time_s: float) -> None:
        bucket = int(_BUCKETS_PER_DOUBLING * log2(max(time_s / _LEAST_S, 1.0)))
        self._counts[min(bucket, _BUCKETS - 1)] += 1.0
        self._total += 1.0
        self.seen += 1
        if self._total >= _FADING_AT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2
        self._stale = self._stale or self.seen % 16 == 0

    @property
    def value_s(self) -> float:
        """As of one of the last 16 values; infinite before there are enough."""
        if self.seen < ENOUGH:
            return inf
        if self._stale:
            self._stale, above, bucket = False, 0.0, _BUCKETS
            while above <= self._total * (1 - _SHARE):
                bucket -= 1
                above += self._counts[bucket]
            self._value_s = _LEAST_S * 2.0 ** ((bucket + 1) / _BUCKETS_PER_DOUBLING)
        return self._value_s


@dataclass(slots=True)
class _Mean:
    least_weight: float
    value: float = 0.0
    seen: int = 0

    def add(self, value: float) -> None:
        self.seen += 1
        self.value += (value - self.value) * max(1 / self.seen, self.least_weight)


@dataclass(slots=True)
class EncodeTimes:
    """Part of ``machine.router.cluster.ClusterMachine``."""

    _tails: defaultdict[int, Tail] = field(default_factory=lambda: defaultdict(Tail))
    """By the binary digits of the item's tokens."""
    _means: defaultdict[int, _Mean] = field(default_factory=lambda: defaultdict(lambda: _Mean(_MEAN_WEIGHT)))
    """Seconds, by the binary digits of the tokens that were pending at the encoder, the item's included."""
    _slowness: defaultdict[str, _Mean] = field(default_factory=lambda: defaultdict(lambda: _Mean(_SLOWNESS_WEIGHT)))
    """By encoder: its times as multiples of these means."""

    def tail_s(self, tokens: int) -> float:
        """The 99th percentile for items of about this size; infinite before there are enough."""
        tail = self._tails.get(tokens.bit_length())
        return inf if tail is None else tail.value_s

    def took(self, name: str, tokens: int, pending: int, time_s: float) -> float | None:
        """Learn how long an item took. Returns ``relative`` to the pool."""
        self.took_at_least(tokens, time_s)
        relative = self.relative(pending, time_s)
        self._means[pending.bit_length()].add(time_s)
        if relative is not None:
            self._slowness[name].add(min(relative, _MOST_RELATIVE))
        return relative

    def took_at_least(self, tokens: int, time_s: float) -> None:
        """Learn that an item took longer: its call was cancelled then."""
        self._tails[tokens.bit_length()].observe(time_s)

    def relative(self, pending: int, time_s: float) -> float | None:
        """A time as a multiple of the pool's mean for as many pending tokens; None if that is not known."""
        mean = self._means.get(pending.bit_length())
        return None if mean is None or mean.seen < _ENOUGH_TO_COMPARE else time_s / max(mean.value, _LEAST_S)

    def is_slow(self, name: str, others: Iterable[str], factor: float) -> bool:
        """Whether the encoder is slower than the median of the others by more than this factor."""
        own = self._slowness.get(name)
        if own is None or own.seen < _ENOUGH_TO_COMPARE:
            return False
        return is_outlier(own.value, self._known(others), factor)

    def was_slow(self, relative: float, others: Iterable[str], factor: float) -> bool:
        """Whether a single time, ``relative`` to the pool, was."""
        return is_outlier(relative, self._known(others), factor)

    def forget(self, name: str) -> None:
        """What the encoder did says nothing about it any more."""
        self._slowness.pop(name, None)

    def restart_tails(self) -> None:
        """The pool has changed: the percentiles of its times are unknown."""
        self._tails.clear()

    def _known(self, names: Iterable[str]) -> list[float]:
        means = (self._slowness.get(name) for name in names)
        return [mean.value for mean in means if mean is not None and mean.seen >= _ENOUGH_TO_COMPARE]
