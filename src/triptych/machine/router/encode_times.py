"""How long encodes take: their 99th percentile in the pool, and how slow each encoder is beside the others.

A time counts at the router, from the grant to the answer: queue, preprocessing, batch and network. It depends on the
item's size, hence a percentile for each power of two of tokens.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf, log2

from triptych.machine.router.relative_times import RelativeTimes

ENOUGH = 100
"""Encodes of a size before their percentile is used."""
_SHARE = 0.99
_LEAST_S = 1e-4
_BUCKETS_PER_DOUBLING = 8
_BUCKETS = 24 * _BUCKETS_PER_DOUBLING
_FADING_AT = 1000.0


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
class EncodeTimes(RelativeTimes):
    """Owner of the times that encoders take.

    Part of ``machine.router.cluster.ClusterMachine``.
    """

    _tails: defaultdict[int, Tail] = field(default_factory=lambda: defaultdict(Tail))
    """By the binary digits of the item's tokens."""

    def tail_s(self, tokens: int) -> float:
        """The 99th percentile for items of about this size; infinite before there are enough."""
        tail = self._tails.get(tokens.bit_length())
        return inf if tail is None else tail.value_s

    def encoded(self, name: str, tokens: int, pending: int, time_s: float) -> float | None:
        """Learn how long an item took. Returns ``relative`` to the pool."""
        self.took_at_least(tokens, time_s)
        return self.took(name, pending, time_s)

    def took_at_least(self, tokens: int, time_s: float) -> None:
        """Learn that an item took longer: its call was cancelled then."""
        self._tails[tokens.bit_length()].observe(time_s)

    def restart_tails(self) -> None:
        """The pool has changed: the percentiles of its times are unknown."""
        self._tails.clear()
