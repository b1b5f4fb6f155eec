"""In-process links between services, with the faults of networks and processes.

A ``Link`` replaces a gRPC stub: it delays calls, loses requests and replies, enforces deadlines, stalls as a stopped
process does, and dies as a killed one does: running calls raise InstanceLost, later ones Unavailable.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from enum import Enum
from types import TracebackType
from typing import Any, Generic, TypeVar

from triptych import ports
from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLimits, InstanceLoad
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.pool import ManagerStatus, ManualSize, MemberReport, MembershipDelta, Order, Watch
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.errors import DeadlineExceeded, InstanceLost, TriptychError, Unavailable

S = TypeVar("S")
T = TypeVar("T")

CALL_TIMEOUT_S = 5.0
"""Deadline of calls without one."""


class Fault(Enum):
    """The fate of one call."""

    NONE = "none"
    REQUEST_LOST = "request lost"
    REPLY_LOST = "reply lost"
    """The work is done, but the caller does not learn of it."""


class Link(Generic[S]):
    """The link to one instance. ``latency_s`` is called per direction, ``fault`` per call (with the method)."""

    def __init__(
        self,
        name: str,
        target: S,
        *,
        latency_s: Callable[[], float] = lambda: 0.0005,
        fault: Callable[[str], Fault] = lambda _: Fault.NONE,
    ) -> None:
        self.name = name
        self.latency_s = latency_s
        self.fault = fault
        self._target: S | None = target
        self._incarnation = 0
        self._calls: dict[_Call, None] = {}  # in start order
        self._runs = asyncio.Event()
        self._runs.set()

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    @property
    def stalled(self) -> bool:
        return not self._runs.is_set()

    def kill(self) -> None:
        """Kill the process: running calls are lost, and nothing answers."""
        self._target = None
        for call in tuple(self._calls):
            call.lose()

    def restart(self, target: S) -> None:
        """Replace the process, also a stalled one; calls to the old one stay lost."""
        self.kill()
        self._target = target
        self.resume()
        self._incarnation += 1

    def break_calls(self) -> None:
        """Lose all running calls, as when a connection breaks; later ones get through."""
        for call in tuple(self._calls):
            call.lose()

    def stall(self) -> None:
        """Stop the process: nothing fails and nothing answers."""
        self._runs.clear()

    def resume(self) -> None:
        self._runs.set()

    async def call(self, method: str, invoke: Callable[[S], Awaitable[T]], timeout_s: float = CALL_TIMEOUT_S) -> T:
        """A unary call."""
        async with self._deadline(method, timeout_s), _Call(self):
            target, fault = await self._request(method)
            with _sent():
                answer = await invoke(target)
            await self._travel()
            if fault is Fault.REPLY_LOST:
                raise Unavailable(f"{self.name} has lost the reply to {method}")
            return answer

    async def stream(
        self, method: str, invoke: Callable[[S], AsyncGenerator[T]], timeout_s: float | None = None
    ) -> AsyncGenerator[T]:
        """A streaming call; a lost reply breaks it after the first answer."""
        loop = asyncio.get_running_loop()
        ends_s = None if timeout_s is None else loop.time() + timeout_s
        async with self._deadline(method, timeout_s), _Call(self):
            target, fault = await self._request(method)
            incarnation = self._incarnation
        answers = invoke(target)
        try:
            while True:
                left_s = None if ends_s is None else ends_s - loop.time()
                async with self._deadline(method, left_s), _Call(self):
                    if self._target is None or self._incarnation != incarnation:
                        raise InstanceLost(f"{self.name} was lost during {method}")
                    try:
                        with _sent():
                            answer = await anext(answers)
                    except StopAsyncIteration:
                        return
                    await self._travel()
                yield answer
                if fault is Fault.REPLY_LOST:
                    raise InstanceLost(f"the link to {self.name} broke during {method}")
        finally:
            try:
                await answers.aclose()
            except Exception:
                if self._target is not None and self._incarnation == incarnation:
                    raise  # else the process is dead and cannot clean up

    async def carry(self, requests: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """The requests of a streaming call, as they arrive at the target."""
        async with aclosing(requests):
            async for request in requests:
                await self._travel()
                yield request

    async def _request(self, method: str) -> tuple[S, Fault]:
        if self._target is None:
            raise Unavailable(f"{self.name} is not there")
        fault = self.fault(method)
        await self._travel()
        if fault is Fault.REQUEST_LOST:
            raise Unavailable(f"{self.name} has lost {method}")
        if self._target is None:
            raise Unavailable(f"{self.name} is not there")
        return self._target, fault

    async def _travel(self) -> None:
        await asyncio.sleep(self.latency_s())
        await self._runs.wait()

    def _deadline(self, method: str, timeout_s: float | None) -> AbstractAsyncContextManager[None]:
        return nullcontext() if timeout_s is None else self._limited(method, timeout_s)

    @asynccontextmanager
    async def _limited(self, method: str, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(f"{self.name} did not answer {method} in time") from None


@contextmanager
def _sent() -> Iterator[None]:
    """An error that the target raises is sent by it, as over gRPC."""
    try:
        yield
    except TriptychError as error:
        error.sent_by_peer = True
        raise


class _Call:
    """A running call on a link: ``lose`` ends it with InstanceLost wherever it waits."""

    def __init__(self, link: Link[Any]) -> None:
        self._link = link
        self._lost = False
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None  # noqa: S101  # an async with runs in a task
        self._cancelling = self._task.cancelling()
        self._link._calls[self] = None  # noqa: SLF001  # a part of Link

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._link._calls[self]  # noqa: SLF001
        if self._lost and self._task is not None and self._task.uncancel() <= self._cancelling:
            raise InstanceLost(f"{self._link.name} was lost during the call") from None

    def lose(self) -> None:
        if not self._lost and self._task is not None:
            self._lost = True
            self._task.cancel()


class LinkedInstance:
    """``ports.InstanceClient`` over a link, limited to what the target implements."""

    def __init__(self, link: Link[Any]) -> None:
        self._link = link

    async def describe(self) -> InstanceInfo:
        return await self._link.call("describe", lambda instance: instance.describe())

    def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        return self._link.stream("watch_load", lambda instance: instance.watch_load())

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        return await self._link.call("encode", lambda encoder: encoder.encode(request), request.timeout_s)

    async def lease(self, request: LeaseRequest) -> Ticket:
        return await self._link.call("lease", lambda encoder: encoder.lease(request), request.timeout_s)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await self._link.call("release", lambda encoder: encoder.release(lease_ids))

    def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        return self._link.stream("generate", lambda text: text.generate(request), request.timeout_s)

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        return await self._link.call("load_lora", lambda text: text.load_lora(order))

    async def unload_lora(self, name: str) -> None:
        await self._link.call("unload_lora", lambda text: text.unload_lora(name))

    async def close(self) -> None:
        """Does nothing: the link stays for the next connection."""


class LinkedPoolManager:
    """``ports.PoolManagerClient`` over a link. A stalled link delivers reports when it resumes, as a socket does."""

    def __init__(self, link: Link[ports.PoolManager]) -> None:
        self._link = link

    def attend(self, reports: AsyncGenerator[MemberReport]) -> AsyncGenerator[Order]:
        return self._link.stream("attend", lambda manager: manager.attend(self._link.carry(reports)))

    def watch(self, watch: Watch) -> AsyncGenerator[MembershipDelta]:
        return self._link.stream("watch", lambda manager: manager.watch(watch))

    async def status(self) -> ManagerStatus:
        return await self._link.call("status", lambda manager: manager.status())

    async def drain_instance(self, instance_id: str, *, force: bool) -> None:
        await self._link.call("drain_instance", lambda manager: manager.drain_instance(instance_id, force=force))

    async def switch_instance(self, instance_id: str, role: Role, *, force: bool) -> None:
        await self._link.call(
            "switch_instance", lambda manager: manager.switch_instance(instance_id, role, force=force)
        )

    async def set_limits(self, instance_id: str, wanted: InstanceLimits) -> None:
        await self._link.call("set_limits", lambda manager: manager.set_limits(instance_id, wanted))

    async def set_size(self, order: ManualSize) -> None:
        await self._link.call("set_size", lambda manager: manager.set_size(order))

    async def roll(self, pool: PoolName, degree: int) -> None:
        await self._link.call("roll", lambda manager: manager.roll(pool, degree))

    async def close(self) -> None:
        """Does nothing: the link stays for the next connection."""
