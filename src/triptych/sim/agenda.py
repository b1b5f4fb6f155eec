"""The agenda: a clock that jumps from event to event."""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

_TOGETHER_S = 1e-9
"""Events this close are of one time, as timers of an event loop are."""
_ALLOCATIONS = 1_000_000
"""Of objects, between two collections of garbage."""


class Agenda:
    """Owner of the time and of what is to happen.

    Events of one time happen in the order in which they were set. What they cause at that time comes after all of them.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._count = 0
        self._is_over = False

    def at(self, when_s: float, call: Callable[..., object], *arguments: Any) -> None:
        self._count += 1
        heappush(self._timers, (when_s, self._count, call, arguments))

    def after(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> None:
        """With no delay it happens at this time."""
        if delay_s > 0:
            self._count += 1
            heappush(self._timers, (self.now_s + delay_s, self._count, call, arguments))
        else:
            self._ready.append((call, arguments))

    def soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """At this time, after what is set for it already."""
        self._ready.append((call, arguments))

    def stop(self) -> None:
        """Nothing more happens."""
        self._is_over = True

    def run(self) -> None:
        """Until nothing is left to happen, or ``stop``."""
        timers, ready = self._timers, self._ready
        while not self._is_over:
            if ready:
                call, arguments = ready.popleft()
                call(*arguments)
            elif timers:
                self.now_s, _, call, arguments = heappop(timers)
                until_s = self.now_s + _TOGETHER_S
                if timers and timers[0][0] <= until_s:
                    ready.append((call, arguments))
                    while timers and timers[0][0] <= until_s:
                        _, _, call, arguments = heappop(timers)
                        ready.append((call, arguments))
                else:
                    call(*arguments)
            else:
                return


@contextmanager
def rarely_collected() -> Iterator[None]:
    """What requests leave behind has no cycles, and the collector would look at all that is kept again and again."""
    usual = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
