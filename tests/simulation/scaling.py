"""What pool managers share in a simulated cluster: a store that can be lost, and a scaler that starts and stops instances."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TypeVar

from triptych import ports
from triptych.domain.decision import Bounds
from triptych.domain.profile import (
    DecodeRow,
    EncodeRow,
    Measured,
    Origin,
    PrefillRow,
    Profile,
    ProfileIdentity,
    TransferRow,
)
from triptych.domain.scaling import PoolName, ScaledPool
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.errors import InvalidRequest, TriptychError, Unavailable
from triptych.machine.process_pools import RestartRules
from triptych.policy.transport import MEMORY
from triptych.runtime.tasks import TaskScope
from triptych.scaling.processes import ProcessScaler
from triptych.sim.processes import Node, SimProcesses
from triptych.store.memory import MemoryStore
from triptych.testing.fakes import FAKE_MODEL

T = TypeVar("T")

QUICK_S = (0.001, 0.02)
"""Latency of a scaler that is well."""


class SharedStore(MemoryStore):
    """A store for several managers, as Redis is: it can lose everything."""

    def lose_everything(self) -> None:
        """Forget all tables, logs and leases. Versions and tokens do not go back, as they follow the clock in Redis."""
        for name, table in self._tables.items():
            for key in list(table.entries):
                del table.entries[key]
                self._notify(name, key)
        self._logs.clear()
        self._leases.clear()


def profile_of_encoder(batch_s: float, token_s: float, *, pull_byte_s: float = 0.0) -> Profile:
    """Of a ``FakeEncoderEngine``; pulls from others take ``pull_byte_s``."""
    rows = (EncodeRow(n, items, batch_s + token_s * n * items) for n in (1, 64, 256) for items in (1, 4, 16))
    identity = ProfileIdentity(ModelPart.ENCODER, "0" * 64, frozenset({Stage.ENCODE}), "sim", FAKE_MODEL.dtype)
    pulls = (TransferRow(MEMORY, nbytes, pull_byte_s * nbytes) for nbytes in (1, 1 << 20) if pull_byte_s)
    return Profile(identity, _MADE_UP, encode=tuple(rows), transfer=tuple(pulls))


def profile_of_decoder(step_s: float, token_s: float, sequence_s: float = 0.0) -> Profile:
    """Of a ``FakeTextEngine``."""
    stages = frozenset({Stage.PREFILL, Stage.DECODE})
    identity = ProfileIdentity(ModelPart.DECODER, "0" * 64, stages, "sim", FAKE_MODEL.dtype)
    return Profile(
        identity,
        _MADE_UP,
        prefill=tuple(PrefillRow(n, 0, step_s + token_s * n) for n in (1, 256, 4096)),
        decode=tuple(
            DecodeRow(batch, context, step_s + sequence_s * batch) for batch in (1, 64) for context in (1, 4096)
        ),
    )


_MADE_UP = Measured(Origin.SYNTHETIC, "2026-01-01T00:00:00Z", start_s=5.0)


class FaultyProcesses(SimProcesses):
    """Processes whose start can fail. ``boot`` makes an instance run."""

    def __init__(
        self,
        boot: Callable[[Role, str], Awaitable[None]],
        find: Callable[[str], Node | None],
        *,
        boot_s: Callable[[], float],
        scope: TaskScope,
    ) -> None:
        self.crashes = False
        """Whether a process that starts ends before it is ready."""
        self.refuses = False
        """Nothing can be started."""
        self.slow = False
        """What starts does not become ready, until this is over."""
        self.most_devices = 8
        """Largest tensor-parallel degree."""

        async def boot_or_crash(role: Role, process: str, ordered_s: float) -> None:
            del ordered_s
            if self.crashes:
                self.ended(process, "exit status 1")
            else:
                await boot(role, process)

        super().__init__(boot_or_crash, find, boot_s=lambda role: boot_s(), scope=scope)

    async def start(self, pool: str, process: str) -> None:
        if self.refuses:
            raise Unavailable("there is no machine for it")
        await super().start(pool, process)

    def check_degree(self, pool: str, degree: int) -> None:
        if degree > self.most_devices:
            raise InvalidRequest(f"{pool}: there are {self.most_devices} devices")

    async def _comes_up(self, role: Role, stopped: asyncio.Event) -> None:
        await super()._comes_up(role, stopped)
        while self.slow and not stopped.is_set():  # noqa: ASYNC110 - a test decides
            await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class GivenOrder:
    """An order that a scaler has received. ``size`` is None for a removal."""

    at_s: float
    manager: str
    pool: PoolName
    size: int | None
    instance: str
    token: int
    refused: bool


class OrderBook:
    """Notes what the managers order, and the orders that a leader must not give: ``violations``."""

    def __init__(self, bounds: Bounds, *, clock: ports.Clock, works: Callable[[str], bool]) -> None:
        """``works`` says whether an instance is up and has not drained."""
        self.orders: list[GivenOrder] = []
        self.violations: list[str] = []
        self._bounds = bounds
        self._clock = clock
        self._works = works
        self._token = 0

    async def scale(self, scaler: ports.Scaler, manager: str, pool: PoolName, size: int, token: int) -> None:
        refused = True
        try:
            await scaler.scale(pool, size, token)
            refused = False
        finally:
            self._given(GivenOrder(self._clock(), manager, pool, size, "", token, refused))
        if not self._bounds.least <= size <= self._bounds.most:
            self.violations.append(f"{self.orders[-1]} is outside {self._bounds}")

    async def remove(self, scaler: ports.Scaler, manager: str, pool: PoolName, instance: str, token: int) -> None:
        works, refused = self._works(instance), True
        try:
            await scaler.remove(pool, instance, token)
            refused = False
        finally:
            self._given(GivenOrder(self._clock(), manager, pool, None, instance, token, refused))
        if works:
            self.violations.append(f"{self.orders[-1]} stops an instance that has not drained")

    def _given(self, order: GivenOrder) -> None:
        self.orders.append(order)
        if not order.refused:
            if order.token < self._token:
                self.violations.append(f"{order} was carried out after one with token {self._token}")
            self._token = max(self._token, order.token)

    def changes(self, pool: PoolName) -> list[tuple[float, int]]:
        """Times and sizes of the changes of the declared size; the first declaration is none."""
        given = [(order.at_s, order.size) for order in self.orders if order.pool == pool and not order.refused]
        sizes = [(at_s, size) for at_s, size in given if size is not None]
        return [later for earlier, later in pairwise(sizes) if earlier[1] != later[1]]


class ScalerLink:
    """One manager's way to a scaler (``ports.Scaler``). Calls take time, can be held up, and can fail.

    A call that has been sent arrives, even if nobody waits for its answer any more. One that fails has been carried out or
    not: its caller cannot know.
    """

    def __init__(self, name: str, scaler: ports.Scaler, book: OrderBook, *, rng: Random, scope: TaskScope) -> None:
        self.latency_s = QUICK_S
        self.failing = 0.0
        """Share of the calls that fail."""
        self._name = name
        self._scaler = scaler
        self._book = book
        self._rng = rng
        self._scope = scope
        self._runs = asyncio.Event()
        self._runs.set()

    def hold(self) -> None:
        """Let nothing through, as if the manager was stopped in the middle of a call."""
        self._runs.clear()

    def let_go(self) -> None:
        """Deliver what was held up."""
        self._runs.set()

    async def scale(self, pool: PoolName, size: int, token: int) -> None:
        await self._call(lambda: self._book.scale(self._scaler, self._name, pool, size, token))

    async def remove(self, pool: PoolName, instance: str, token: int) -> None:
        await self._call(lambda: self._book.remove(self._scaler, self._name, pool, instance, token))

    async def set_degree(self, pool: PoolName, degree: int, token: int) -> None:
        await self._call(lambda: self._scaler.set_degree(pool, degree, token))

    async def pools(self) -> tuple[ScaledPool, ...]:
        return await self._call(self._scaler.pools)

    async def close(self) -> None:
        """The scaler goes on for the others."""

    async def _call(self, invoke: Callable[[], Awaitable[T]]) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._scope.spawn(self._carry(invoke, answer), name=f"order of {self._name}")
        return await answer

    async def _carry(self, invoke: Callable[[], Awaitable[T]], answer: asyncio.Future[T]) -> None:
        await asyncio.sleep(self._rng.uniform(*self.latency_s))
        await self._runs.wait()
        fails = self._rng.random() < self.failing
        error: TriptychError | None = Unavailable("the scaler did not answer") if fails else None
        try:
            if not fails or self._rng.random() < 0.5:
                found = await invoke()
        except TriptychError as refused:
            error = refused
        await self._runs.wait()
        if answer.done():  # nobody waits any more
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found)


def process_scaler(
    processes: SimProcesses, names: dict[PoolName, str], *, clock: ports.Clock, rules: RestartRules
) -> ProcessScaler:
    """The scaler of ``triptych up``, over simulated processes."""
    scaler = ProcessScaler(processes, scaled=names, others={}, rules=rules, clock=clock)
    processes.ended = scaler.ended
    return scaler
