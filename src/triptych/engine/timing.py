"""Times of calls."""

import time
from collections.abc import Callable


def timed_s(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def fastest_s(work: Callable[[], object]) -> float:
    """The shorter of two runs: disturbances only lengthen a measurement."""
    return min(timed_s(work) for _ in range(2))
