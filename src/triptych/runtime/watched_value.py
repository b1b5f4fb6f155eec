"""A watched value: sent at once, after each change, and periodically without one."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from triptych.domain.bounds import Between
from triptych.domain.limits import check_limits

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReportIntervals:
    """Intervals at which a watcher hears of a value."""

    load_min_interval_s: Annotated[float, Between(0.001, 10)] = 0.02
    """Shortest time between two load reports to one watcher."""
    load_max_interval_s: Annotated[float, Between(0, 60, above=True)] = 1.0
    """Longest time between two load reports to one watcher."""

    def __post_init__(self) -> None:
        check_limits(self)


class WatchedValue(Generic[T]):
    """Watchers read the current value, so a slow one skips intermediate values and no queue grows.

    The shortest interval bounds the rate per watcher; after the longest without a change the value is sent again as a
    heartbeat.
    """

    def __init__(self, read: Callable[[], T], intervals: ReportIntervals, *, most_per_s: float = math.inf) -> None:
        """``most_per_s``: changes per second to all watchers together; many of them hear of changes less often."""
        self._read = read
        self._intervals = intervals
        self._most_per_s = most_per_s
        self._watchers: dict[asyncio.Event, None] = {}
        """Watchers in the order in which they began, which is that in which they hear of a change. A set would not do:
        events hash by address.
        """
        self._listeners: list[Callable[[], None]] = []

    def notify(self) -> None:
        """Signal that the value may have changed."""
        for changed in self._watchers:
            changed.set()
        for listener in self._listeners:
            listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on every ``notify``."""
        self._listeners.append(listener)

    async def watch(self, more: Callable[[], bool] | None = None) -> AsyncGenerator[T]:
        """Watch the value. While ``more()`` it is sent again without a change."""
        changed = asyncio.Event()
        self._watchers[changed] = None
        try:
            while True:
                changed.clear()
                yield self._read()
                await asyncio.sleep(max(self._intervals.load_min_interval_s, len(self._watchers) / self._most_per_s))
                if more is not None and more():
                    continue
                try:
                    async with asyncio.timeout(self._intervals.load_max_interval_s):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            del self._watchers[changed]

    async def wait_until(self, holds: Callable[[T], bool]) -> None:
        """Return once ``holds(value)`` is true."""
        async with aclosing(self.watch()) as values:
            async for value in values:
                if holds(value):
                    return
