"""The lifetime of one request: deadline, client disconnect, shutdown."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from triptych.domain.limits import Seconds
from triptych.errors import Cancelled, DeadlineExceeded, TriptychError
from triptych.ports import Clock

GRACE_S = 0.5
"""Time after the deadline at which the body is ended, seconds. Whoever works for it enforces the deadline; this only
backs it up.
"""


class RequestLifetime:
    """Owner of a REST request's timeout.

    It ends its body early and raises the reason: the deadline, a client that left, a shutdown.

    The timeout counts from ``arrived_s``, which may be long ago.
    """

    def __init__(self, timeout_s: Seconds, arrived_s: Seconds, clock: Clock) -> None:
        self._timeout_s = timeout_s
        self._deadline_s = arrived_s + timeout_s
        self._clock = clock
        self._reason: TriptychError | None = None
        self._timeout = asyncio.timeout(max(0.0, self._deadline_s - clock()) + GRACE_S)

    def check(self) -> Seconds:
        """Raises DeadlineExceeded once the deadline has passed, whether or not the body was ended. Returns the time left, in seconds."""
        left_s = self._deadline_s - self._clock()
        if left_s <= 0:
            raise self._late()
        return left_s

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request took longer than its {self._timeout_s:g} s")

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run the body within this lifetime, once. Raises the reason if it was ended early."""
        try:
            async with self._timeout:
                yield
        except TimeoutError as error:
            if not self._timeout.expired():
                raise
            raise (self._reason or self._late()) from error

    def end(self, reason: TriptychError) -> None:
        """End the body now. The first reason counts."""
        if self._reason is None and not self._timeout.expired():
            self._reason = reason
            self._timeout.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def ended_by(self, disconnected: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
        """End the lifetime when ``gone`` returns, which means that the client has left."""

        async def watch() -> None:
            await disconnected()
            self.end(Cancelled("the client closed the connection"))

        failure: Exception | None = None
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(watch())
            try:
                yield
            except Exception as error:  # noqa: BLE001 - raised again below, without the group around it
                failure = error
            finally:
                watcher.cancel()
        if failure is not None:
            raise failure
