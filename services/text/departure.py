"""How a request leaves this instance before its end: refused if it has not begun, else transferred to another one if that can be."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from triptych.errors import DeadlineExceeded
from triptych.ports import Clock


class DepartsError(Exception):
    """A wait has ended as the request is to leave."""


class Departure:
    """Bounds the waits of one request, by its deadline and by the wish that it leaves: the instance drains, a stage closes, or items
    hold it up.
    """

    def __init__(self, *, timeout_s: float, deadline_s: float, clock: Clock) -> None:
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._clock = clock
        self.is_wanted = False
        """Whether the request is to leave. Reset by who has tried that."""
        self._is_settled = False
        self._limit: asyncio.Timeout | None = None
        """The limit that ends its present wait."""
        self.why = ""
        """As in ``Record.kv_transferred``."""

    def want(self, why: str) -> None:
        """Ask it to leave: its present wait ends with DepartsError."""
        if self._is_settled:
            return
        self.is_wanted, self.why = True, why
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def settle(self, why: str = "") -> None:
        """Note that it will be transferred: nobody need want that any more."""
        self._is_settled, self.is_wanted, self.why = True, False, why or self.why

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Raises DeadlineExceeded or DepartsError when the wait within must end."""
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - self._clock())) as self._limit:
                yield
        except TimeoutError:
            if self.is_wanted and self._clock() < self._deadline_s:
                raise DepartsError from None
            raise DeadlineExceeded(f"the request was not answered within {self._timeout_s:.3g} s") from None
        finally:
            self._limit = None
