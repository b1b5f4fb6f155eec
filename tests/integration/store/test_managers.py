"""Two pool managers as processes with a real Redis: one leads, and another takes over when it dies or is paused."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.contract.store_kit import RedisServer
from triptych.cli import ports
from triptych.domain.decision import ScalingStatus
from triptych.domain.instance import InstanceLoad
from triptych.domain.membership import MemberKind
from triptych.domain.pool import ManagerStatus, ManualSize, Registration
from triptych.domain.scaling import Phase, PoolName, ScaledInstance, ScaledPool
from triptych.domain.stage import Role
from triptych.errors import Deposed, NotFound, TriptychError
from triptych.rpc.scaler import SERVICE_NAME, ScalerServicer
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import PoolManagerStub
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.registrar import Registrar
from triptych.runtime.tasks import TaskScope

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

POOL = PoolName("m", Role.E)
LIMIT_S = 60.0
LEASE = ("--lease-ttl-s", "6", "--lease-margin-s", "2", "--lease-retry-s", "0.3", "--redis-timeout-s", "1.5")
QUICK = ("--adopt-s", "1", "--start-s", "1", "--log-level", "INFO")


class Instance:
    """What a registrar tells of an instance."""

    def __init__(self, name: str, managers: tuple[str, ...]) -> None:
        self.name = name
        self.draining = False
        self._listeners: list[Callable[[], None]] = []
        self.scope = TaskScope(name)
        access = ManagerAccess(managers, heartbeat_s=0.5, manager_retry_max_s=0.5)
        Registrar(self, self.introduce, self.drain, PoolManagerStub, access, self.scope).start()

    async def introduce(self) -> Registration:
        address = f"127.0.0.1:{1000 + int(self.name[1:])}"
        return Registration(MemberKind.INSTANCE, self.name, 1, address, "m", role=Role.E)

    def load(self) -> InstanceLoad:
        return InstanceLoad({}, self.draining)

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def drain(self) -> None:
        self.draining = True
        for listener in self._listeners:
            listener()


class RecordingScaler:
    """``ports.Scaler`` whose instances start at once."""

    def __init__(self, managers: tuple[str, ...]) -> None:
        self.managers = managers
        self.wanted = 0
        self.token = 0
        self.numbers = 0
        self.running: dict[str, Instance] = {}
        self.accepted: list[tuple[int, str]] = []
        self.refused: list[int] = []

    async def scale(self, pool: PoolName, size: int, token: int) -> None:
        self._take(token, f"scale {size}")
        assert pool == POOL
        self.wanted = size
        self.grow()

    def grow(self) -> None:
        while len(self.running) < self.wanted:
            self.numbers += 1
            self.running[f"e{self.numbers}"] = Instance(f"e{self.numbers}", self.managers)

    async def remove(self, pool: PoolName, instance: str, token: int) -> None:
        self._take(token, f"remove {instance}")
        assert pool == POOL
        if instance not in self.running:
            raise NotFound("no such instance")
        await self.running.pop(instance).scope.close()
        self.grow()

    def _take(self, token: int, what: str) -> None:
        if token < self.token:
            self.refused.append(token)
            raise Deposed("an old token")
        self.token = token
        self.accepted.append((token, what))

    async def pools(self) -> tuple[ScaledPool, ...]:
        return (ScaledPool(POOL, self.wanted, tuple(ScaledInstance(name, Phase.RUNNING) for name in self.running)),)

    async def close(self) -> None:
        for instance in self.running.values():
            await instance.scope.close()


class Managers:
    """Two processes, a scaler and a Redis."""

    def __init__(self, redis: RedisServer, logs: Path) -> None:
        self.redis = redis
        self._logs = logs
        self._scaler_port, *own = ports.free(3, ())
        self.targets = dict(zip("ab", map(ports.address, own), strict=True))
        self.scaler = RecordingScaler(tuple(self.targets.values()))
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._stubs = {name: PoolManagerStub(target) for name, target in self.targets.items()}

    async def boot(self, name: str) -> None:
        command = (sys.executable, "-m", "services.pool_manager", "--port", self.targets[name].rpartition(":")[2])
        told = ("--scaler", ports.address(self._scaler_port), "--autoscale", "--redis", self.redis.settings.redis)
        with (self._logs / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *command, *told, *LEASE, *QUICK, stdout=log, stderr=log
            )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Managers"]:
        register = ScalerServicer(self.scaler).register
        server = RpcServer(host="127.0.0.1", port=self._scaler_port, service_names=(SERVICE_NAME,), register=register)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(server)
            stack.push_async_callback(self.scaler.close)
            stack.push_async_callback(self._end)
            self.scaler.wanted = 2
            self.scaler.grow()
            for name in self.targets:
                await self.boot(name)
            yield self

    async def _end(self) -> None:
        for stub in self._stubs.values():
            await stub.close()
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def status(self, name: str) -> ManagerStatus | None:
        with suppress(TriptychError):
            return await self._stubs[name].status()
        return None

    async def pool(self, name: str) -> ScalingStatus | None:
        status = await self.status(name)
        return None if status is None else next((one.scaling for one in status.pools if one.role is Role.E), None)

    async def leader(self, *but: str) -> str:
        """Wait until a manager leads, other than these, and has its pool as wanted."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for name in self.targets.keys() - set(but):
                    status, pool = await self.status(name), await self.pool(name)
                    if status is not None and status.leads and pool is not None and not pool.fault:
                        return name
                await asyncio.sleep(0.1)

    async def until(self, name: str, holds: Callable[[ScalingStatus], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while (pool := await self.pool(name)) is None or not holds(pool):  # noqa: ASYNC110 - asked over gRPC
                await asyncio.sleep(0.1)

    async def set_size(self, name: str, size: int) -> None:
        await self._stubs[name].set_size(ManualSize("m", Role.E, size, 600.0))


@pytest.fixture
async def managers(tmp_path: Path) -> AsyncIterator[Managers]:
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        async with Managers(redis, tmp_path).running() as running:
            yield running
    finally:
        redis.kill()


async def test_when_the_leader_is_killed_another_goes_on_with_the_size_that_was_set(managers: Managers) -> None:
    first = await managers.leader()
    await managers.set_size(first, 3)
    await managers.until(first, lambda pool: pool.ready == 3)
    token = managers.scaler.token
    managers.processes[first].kill()
    second = await managers.leader(first)
    pool = await managers.pool(second)
    assert pool is not None
    assert pool.override is not None
    assert (pool.wanted, pool.ready, pool.override.size) == (3, 3, 3)
    assert 500 < pool.override.left_s < 600
    assert managers.scaler.token > token
    await managers.set_size(second, 1)
    await managers.until(second, lambda pool: (pool.ready, pool.draining) == (1, 0))
    assert len(managers.scaler.running) == 1


async def test_a_leader_that_is_paused_past_its_lease_orders_nothing_more(managers: Managers) -> None:
    first = await managers.leader()
    await managers.set_size(first, 4)
    managers.processes[first].send_signal(signal.SIGSTOP)
    second = await managers.leader(first)
    token = managers.scaler.token
    await managers.set_size(second, 3)
    managers.processes[first].send_signal(signal.SIGCONT)
    await managers.until(first, lambda pool: pool.fault == "another manager leads")
    await managers.until(second, lambda pool: pool.ready == 3)
    await asyncio.sleep(1)
    tokens = [given for given, _ in managers.scaler.accepted]
    assert tokens == sorted(tokens)
    assert tokens[-1] == token, "the second one still leads"
    assert len(managers.scaler.running) == 3


async def test_while_redis_is_gone_or_empty_nothing_is_ordered_and_it_heals_by_itself(managers: Managers) -> None:
    first = await managers.leader()
    await managers.set_size(first, 3)
    await managers.until(first, lambda pool: pool.ready == 3)
    managers.redis.kill()
    for name in managers.targets:
        await managers.until(name, lambda pool: "the store does not answer" in pool.fault)
    with pytest.raises(TriptychError, match="the store does not answer"):
        await managers.set_size(first, 1)
    status = await managers.status(first)
    assert status is not None
    assert status.store_fault
    assert sum(len(pool.members) for pool in status.pools) == 3, "members do not notice"
    orders = len(managers.scaler.accepted)
    await asyncio.sleep(2)
    assert len(managers.scaler.accepted) == orders
    managers.redis.start()  # without its data
    leader = await managers.leader()
    pool = await managers.pool(leader)
    assert pool is not None
    assert (pool.wanted, pool.ready) == (3, 3)
    await managers.set_size(leader, 2)
    await managers.until(leader, lambda pool: (pool.ready, pool.draining) == (2, 0))
    async with managers.redis.admin() as admin:
        await admin.flushall()
        await managers.leader()
        async with asyncio.timeout(LIMIT_S):
            while not await admin.hexists("triptych:1:table:pools", "m/E"):  # noqa: ASYNC110 - asked over TCP
                await asyncio.sleep(0.1)
    tokens = [given for given, _ in managers.scaler.accepted]
    assert tokens == sorted(tokens)
    assert managers.scaler.refused == []
