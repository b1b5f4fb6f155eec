"""One request's life: what may end it early, and what it holds meanwhile."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

from triptych.errors import Cancelled, DeadlineExceeded, Overloaded, TriptychError, Unavailable

RETRY_AFTER_S = 1.0
"""What is told to those who come while a bound is reached: requests end all the time."""


class RequestScope:
    """Ends its body early, with the reason as the error: the time limit, a client that left, a shutdown."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reason: TriptychError | None = None
        self._timeout = asyncio.timeout(timeout_s)

    @property
    def left_s(self) -> float:
        """Time left, in seconds, while the body runs."""
        end_s = self._timeout.when()
        return self._timeout_s if end_s is None else max(0.0, end_s - asyncio.get_running_loop().time())

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run the body in this scope, once. Raises the reason when it was ended early."""
        try:
            async with self._timeout:
                yield
        except TimeoutError as error:
            if not self._timeout.expired():
                raise
            reason = self._reason or DeadlineExceeded(f"the request took longer than its {self._timeout_s:g} s")
            raise reason from error

    def end(self, reason: TriptychError) -> None:
        """End the body now; the first reason counts."""
        if self._reason is None and not self._timeout.expired():
            self._reason = reason
            self._timeout.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def ended_by(self, gone: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
        """While the body runs, end the scope as soon as ``gone`` returns: the client has left."""

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


class Admission:
    """Bounds what the gateway holds: requests, and the bytes of their bodies."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._bytes = 0
        self._running: dict[str, RequestScope] = {}
        self._closed: TriptychError | None = None

    @property
    def requests(self) -> int:
        return len(self._running)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    @contextmanager
    def request(self, request_id: str, scope: RequestScope) -> Generator["Hold"]:
        """Raises Overloaded when too many run; ``request_id`` is not running yet."""
        if self._closed is not None:
            raise self._closed
        if len(self._running) >= self._max_requests:
            raise Overloaded(
                f"{self._max_requests} requests are running, which is the limit", retry_after_s=RETRY_AFTER_S
            )
        hold = Hold(self)
        self._running[request_id] = scope
        try:
            yield hold
        finally:
            del self._running[request_id]
            self._bytes -= hold.nbytes

    def take(self, nbytes: int) -> None:
        if self._bytes + nbytes > self._max_bytes:
            raise Overloaded(
                f"the bodies of running requests fill the {self._max_bytes} bytes there are for them",
                retry_after_s=RETRY_AFTER_S,
            )
        self._bytes += nbytes

    def close(self) -> None:
        """End whatever runs, and let nothing in any more."""
        self._closed = Unavailable("the server is shutting down")
        for scope in self._running.values():
            scope.end(Unavailable("the server is shutting down"))


class Hold:
    """The bytes that one request holds, until it ends."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Hold so many more. Raises Overloaded."""
        self.grow_to(self.nbytes + nbytes)

    def grow_to(self, nbytes: int) -> None:
        """Raises Overloaded when there is no room; what was held stays held."""
        if nbytes > self.nbytes:
            self._admission.take(nbytes - self.nbytes)
            self.nbytes = nbytes
