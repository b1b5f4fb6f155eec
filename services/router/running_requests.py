"""The requests that run in this router, and the room that they and shorter calls take."""

import asyncio
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from triptych.errors import Overloaded
from triptych.machine.turnover import Turnover
from triptych.policy.admission import ServerBounds
from triptych.policy.policies import Admission
from triptych.ports import Clock

from .request_task import RequestTask


class RunningRequests:
    """Owner of which requests run, and of what is left of the router's capacity."""

    def __init__(self, bounds: ServerBounds, admission: Admission, clock: Clock) -> None:
        self._bounds = bounds
        self._admission = admission
        self._clock = clock
        self._tasks: dict[int, RequestTask] = {}
        self._newest: dict[str, RequestTask] = {}
        """By request id: an older request of the same id may still be cleaning up."""
        self._of_tenant: Counter[str] = Counter()
        self._calls = 0
        """Calls that are no requests."""
        self._readers = 0
        """Calls that hold embeddings by their keys."""
        self.media_bytes = 0
        """Bytes of media held; for reading."""
        self._places, self._room = Turnover(), Turnover()
        """Of requests, and of bytes of media."""
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[RequestTask]:
        return iter(self._tasks.values())

    def find(self, request_id: str) -> RequestTask | None:
        """The newest request of this id that runs."""
        return self._newest.get(request_id)

    def check_room(self, media_bytes: int, tenant: str, *, shares: bool) -> None:
        """Raise Overloaded if one more request with so much media is too many. ``shares``: others send requests beside this tenant."""
        try:
            self._admission(
                requests=len(self._tasks) + self._calls,
                media_bytes=self.media_bytes,
                new_media_bytes=media_bytes,
                bounds=self._bounds,
                own_requests=self._of_tenant[tenant] if shares else 0,
            )
        except Overloaded as error:
            now_s = self._clock()
            waits_s = [error.retry_after_s or 0.0, self._places.refuse(tenant, now_s)]
            if self.media_bytes + media_bytes > self._bounds.max_media_bytes:
                waits_s.append(self._room.after_s(media_bytes, now_s))
            error.retry_after_s = max(waits_s)
            raise

    def add(self, task: RequestTask) -> None:
        self._tasks[task.number] = self._newest[task.request.request_id] = task
        self._idle.clear()
        self.media_bytes += task.media_bytes
        self._of_tenant[task.tenant.name] += 1

    def remove(self, task: RequestTask) -> bool:
        """End a request. Returns whether it was the newest of its id."""
        del self._tasks[task.number]
        self.media_bytes -= task.media_bytes
        now_s = self._clock()
        self._places.free(1, now_s)
        self._room.free(task.media_bytes, now_s)
        if len(self._tasks) < self._bounds.max_concurrent_requests // 2:
            self._places.rest()
        self._of_tenant[task.tenant.name] -= 1
        if not self._of_tenant[task.tenant.name]:
            del self._of_tenant[task.tenant.name]
        self._rest()
        if self._newest.get(task.request.request_id) is not task:
            return False
        del self._newest[task.request.request_id]
        return True

    @contextmanager
    def tokenizing(self, media_bytes: int) -> Generator[None]:
        """Context of a call that only tokenizes. No drain waits for it."""
        self._calls += 1
        self.media_bytes += media_bytes
        try:
            yield
        finally:
            self._calls -= 1
            self.media_bytes -= media_bytes

    @contextmanager
    def reading(self) -> Generator[None]:
        """Context of a call that holds embeddings by their keys."""
        self._calls += 1
        self._readers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            self._readers -= 1
            self._rest()

    async def ended(self) -> None:
        """Return once nothing runs and nothing is held for a caller."""
        await self._idle.wait()

    def _rest(self) -> None:
        if not (self._tasks or self._readers):
            self._idle.set()
