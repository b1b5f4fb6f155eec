"""Confidence intervals of means over a few independent runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and where it lies with ``CONFIDENCE`` (Student's t). One value alone has no interval: ``half`` is None."""

    mean: float
    half: float | None
    """Half the width."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least one value."""
        count, mean = len(values), sum(values) / len(values)
        if count < 2:
            return cls(mean, None, count)
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        return cls(mean, quantile_of_t(CONFIDENCE, count - 1) * math.sqrt(variance / count), count)

    @property
    def ends(self) -> tuple[float, float] | None:
        return None if self.half is None else (self.mean - self.half, self.mean + self.half)


def quantile_of_t(share: float, freedom: int) -> float:
    """The value that the absolute of Student's t with ``freedom`` degrees stays below with probability ``share``."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < share else (low, middle)
    return high


def _within(limit: float, freedom: int) -> float:
    """The probability that the absolute of Student's t is below ``limit`` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(limit / math.sqrt(freedom))
    is_odd = freedom % 2
    term = total = math.cos(angle) if is_odd else 1.0
    for step in range(2 + is_odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (step - 1) / step
        total += term
    if not is_odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
