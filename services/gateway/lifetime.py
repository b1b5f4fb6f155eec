"""The lifetime of one request: time limit, client disconnect, shutdown."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from triptych.errors import Cancelled, DeadlineExceeded, TriptychError


class RequestLifetime:
    """Ends its body early and raises the reason: the time limit, a client that left, a shutdown."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reason: TriptychError | None = None
        self._timeout = asyncio.timeout(timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds left while the body runs."""
        end_s = self._timeout.when()
        return self._timeout_s if end_s is None else max(0.0, end_s - asyncio.get_running_loop().time())

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run the body within this lifetime, once. Raises the reason if it was ended early."""
        try:
            async with self._timeout:
                yield
        except TimeoutError as error:
            if not self._timeout.expired():
                raise
            reason = self._reason or DeadlineExceeded(f"the request took longer than its {self._timeout_s:g} s")
            raise reason from error

    def end(self, reason: TriptychError) -> None:
        """End the body now. The first reason counts."""
        if self._reason is None and not self._timeout.expired():
            self._reason = reason
            self._timeout.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def ended_by(self, gone: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
        """End the lifetime when ``gone`` returns, which means that the client has left."""

        async def watch() -> None:
            await gone()
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
