"""Ejection: which instances of a pool get no work for a while. Pure functions.

The rules are those of Envoy's outlier detection and gRPC's A50: an instance that fails, or is far slower than the others,
is ejected for a time that grows, and at most a share of the pool at once.
"""

from collections.abc import Collection
from statistics import median


def may_eject(usable: int, ejected: int, share: float) -> bool:
    """Whether one more of ``usable`` instances may be ejected: at most ``share`` of them, though always one of two or
    more, and never the last.
    """
    return ejected + 1 < usable and ejected + 1 <= max(1, int(usable * share))


def ejection_s(before: int, *, first_s: float, longest_s: float) -> float:
    """For how long, after ``before`` ejections in a row."""
    return min(first_s * 2.0 ** min(before, 30), longest_s)


def is_outlier(value: float, others: Collection[float], factor: float) -> bool:
    """Whether ``value`` is more than ``factor`` times the median of the others; never without others."""
    return bool(others) and value > factor * median(others)
