"""The search of the highest rate that a cluster serves as wanted. Pure: the caller makes the runs."""

import math
from dataclasses import dataclass
from typing import Self

from .requests import WorkloadError

PRECISION = 0.02
_MOST_RPS = 1e6


@dataclass(frozen=True, slots=True)
class Bracket:
    """Rates between which a limit is looked for, requests per second."""

    least: float
    highest: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """``1..64``. Raises WorkloadError."""
        least, dots, highest = text.partition("..")
        try:
            found = cls(float(least), float(highest)) if dots else None
        except ValueError:
            found = None
        if found is None or not 0 < found.least < found.highest <= _MOST_RPS:
            raise WorkloadError(
                f"--goodput {text}: write the least and the highest rate to try, LEAST..HIGHEST, for example 1..64"
            )
        return found


class RateSearch:
    """Looks for the highest rate that is good, taking it that all rates below a good one are good.

    It begins with the least rate and doubles it until one is too high; then it halves the interval, as a ratio.
    """

    def __init__(self, bracket: Bracket, precision: float = PRECISION) -> None:
        """A rate is found once one that is at most ``precision`` higher, as a share, is too high."""
        self._bracket = bracket
        self._precision = precision
        self.good: float | None = None
        """The highest rate that was good."""
        self.too_high: float | None = None
        """The lowest rate that was not."""

    @property
    def next_rate(self) -> float | None:
        """The rate to try next; None when the search is over."""
        if self.good is None:
            return self._bracket.least if self.too_high is None else None
        if self.too_high is None:
            return min(2 * self.good, self._bracket.highest) if self.good < self._bracket.highest else None
        if self.too_high <= self.good * (1 + self._precision):
            return None
        return math.sqrt(self.good * self.too_high)

    def tried(self, rate: float, *, is_good: bool) -> None:
        if is_good:
            self.good = rate
        else:
            self.too_high = rate
