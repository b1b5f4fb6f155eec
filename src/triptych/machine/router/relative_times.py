"""How long the instances of a pool take for the work that they have, and how slow each one is beside the others.

How slow an instance is must not depend on how much it has been given: each of its times is divided by the pool's mean for
equally many pending tokens. Times count in the means as those of an instance that is not slow, so that the means do not depend
on which instances get most.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from triptych.policy.ejection import is_outlier
from triptych.policy.interpolation import Line

_LEAST_S = 1e-4
_ENOUGH_TO_COMPARE = 8
"""Times with as many pending tokens before a mean is used, and of an instance before it is called slow."""
_MEAN_WEIGHT, _SLOWNESS_WEIGHT = 0.02, 0.1
"""Least weight of a new value: older ones fade."""
_LEAST_RELATIVE, _MOST_RELATIVE = 0.05, 20.0
"""What counts of a time, so that one item that needs much preprocessing makes no encoder slow."""


@dataclass(slots=True)
class _Mean:
    least_weight: float
    value: float = 0.0
    seen: int = 0

    def add(self, value: float) -> None:
        self.seen += 1
        self.value += (value - self.value) * max(1 / self.seen, self.least_weight)


@dataclass(slots=True)
class _Means:
    """Of equally many pending tokens, up to a factor of two."""

    tokens: _Mean = field(default_factory=lambda: _Mean(_MEAN_WEIGHT))
    time_s: _Mean = field(default_factory=lambda: _Mean(_MEAN_WEIGHT))

    def relative(self, time_s: float) -> float | None:
        """A time as a multiple of the mean; None before enough is known."""
        mean = self.time_s
        return time_s / max(mean.value, _LEAST_S) if mean.seen >= _ENOUGH_TO_COMPARE else None


@dataclass(slots=True)
class RelativeTimes:
    """Owner of how long an instance takes beside the others of its pool.

    Part of ``machine.router.cluster.ClusterMachine``. A time is that of one item, or of a request to its first token.
    """

    _means: defaultdict[int, _Means] = field(default_factory=lambda: defaultdict(_Means))
    """By the binary digits of the tokens that were pending at the instance, those of the item or request included."""
    _slowness: defaultdict[str, _Mean] = field(default_factory=lambda: defaultdict(lambda: _Mean(_SLOWNESS_WEIGHT)))
    """By instance: its times as multiples of these means."""

    def took(self, name: str, pending: int, time_s: float) -> float | None:
        """Learn a time, of a grant after which so many tokens were ``pending``. Returns ``relative`` to the pool."""
        means, own = self._means[pending.bit_length()], self._slowness[name]
        relative = means.relative(time_s)
        slowness = own.value if own.seen >= _ENOUGH_TO_COMPARE else 1.0
        means.tokens.add(pending)
        means.time_s.add(time_s / max(slowness, _LEAST_RELATIVE))
        if relative is not None:
            own.add(min(relative, _MOST_RELATIVE))
        return relative

    def relative(self, pending: int, time_s: float) -> float | None:
        """A time as a multiple of the pool's mean for as many pending tokens; None if that is not known."""
        means = self._means.get(pending.bit_length())
        return None if means is None else means.relative(time_s)

    def line(self) -> Line | None:
        """The pool's mean time over the pending tokens; None before enough is known."""
        known = [means for means in self._means.values() if means.time_s.seen >= _ENOUGH_TO_COMPARE]
        return Line((means.tokens.value, means.time_s.value) for means in known) if known else None

    def slowness(self, name: str) -> float:
        """The times of an instance as a multiple of the pool's; 1 if that is not known."""
        own = self._slowness.get(name)
        return 1.0 if own is None or own.seen < _ENOUGH_TO_COMPARE else own.value

    def is_slow(self, name: str, others: Iterable[str], factor: float) -> bool:
        """Whether the instance is slower than the median of the others by more than this factor."""
        own = self._slowness.get(name)
        if own is None or own.seen < _ENOUGH_TO_COMPARE:
            return False
        return is_outlier(own.value, self._known(others), factor)

    def was_slow(self, relative: float, others: Iterable[str], factor: float) -> bool:
        """Whether a single time, ``relative`` to the pool, was."""
        return is_outlier(relative, self._known(others), factor)

    def forget(self, name: str) -> None:
        """Forget what the instance did: it says nothing about it any more."""
        self._slowness.pop(name, None)

    def _known(self, names: Iterable[str]) -> list[float]:
        means = (self._slowness.get(name) for name in names)
        return [mean.value for mean in means if mean is not None and mean.seen >= _ENOUGH_TO_COMPARE]
