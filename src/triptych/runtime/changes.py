"""A watched value: sent at once, after each change, and periodically without one."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")


class Changes(Generic[T]):
    """Watchers read the current value, so a slow one skips intermediate values and no queue grows.

    ``min_interval_s`` bounds the rate per watcher; after ``max_interval_s`` without a change the value is sent again as
    a heartbeat.
    """

    def __init__(self, read: Callable[[], T], *, min_interval_s: float, max_interval_s: float) -> None:
        self._read = read
        self._min_interval_s = min_interval_s
        self._max_interval_s = max_interval_s
        self._watchers: set[asyncio.Event] = set()
        self._listeners: list[Callable[[], None]] = []

    def notify(self) -> None:
        """Signal that the value may have changed."""
        for changed in self._watchers:
            changed.set()
        for listener in self._listeners:
            listener()

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on every ``notify``."""
        self._listeners.append(listener)

    async def watch(self) -> AsyncGenerator[T]:
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                yield self._read()
                await asyncio.sleep(self._min_interval_s)
                try:
                    async with asyncio.timeout(self._max_interval_s):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._watchers.discard(changed)

    async def wait_until(self, holds: Callable[[T], bool]) -> None:
        """Return once ``holds(value)`` is true."""
        async with aclosing(self.watch()) as values:
            async for value in values:
                if holds(value):
                    return
