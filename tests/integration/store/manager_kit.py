"""Two pool managers as processes, with a real Redis and a scaler that records what they order."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from tests.contract.store_kit import RedisServer
from tests.e2e.revisions import THIS, Tree
from tests.loaded import LoadedProcess
from triptych.cli import ports
from triptych.domain.decision import ScalingStatus
from triptych.domain.membership import MemberKind
from triptych.domain.pool import ManagerStatus, ManualSize, Registration
from triptych.domain.scaling import PoolName, ProcessPhase, ScaledInstance, ScaledPool
from triptych.domain.stage import Role
from triptych.errors import Deposed, NotFound, TriptychError
from triptych.rpc.scaler import SERVICE_NAME, ScalerServicer
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import PoolManagerStub
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.registrar import Registrar
from triptych.runtime.tasks import TaskScope

POOL = PoolName("m", Role.E)
LIMIT_S = 60.0
LEASE = ("--lease-ttl-s", "6", "--lease-margin-s", "2", "--lease-retry-s", "0.3", "--redis-timeout-s", "1.5")
QUICK = ("--adopt-s", "1", "--start-s", "1", "--log-level", "INFO")


class Instance(LoadedProcess):
    """What a registrar tells of an instance."""

    def __init__(self, name: str, managers: tuple[str, ...]) -> None:
        super().__init__()
        self.name = name
        self.scope = TaskScope(name)
        access = ManagerAccess(managers, heartbeat_s=0.5, manager_retry_max_s=0.5)
        Registrar(self, self.introduce, self.drain, PoolManagerStub, access, self.scope).start()

    async def introduce(self) -> Registration:
        address = f"127.0.0.1:{1000 + int(self.name[1:])}"
        return Registration(MemberKind.INSTANCE, self.name, 1, address, "m", role=Role.E)


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

    async def set_degree(self, pool: PoolName, degree: int, token: int) -> None:
        raise AssertionError((pool, degree, token))

    def _take(self, token: int, what: str) -> None:
        if token < self.token:
            self.refused.append(token)
            raise Deposed("an old token")
        self.token = token
        self.accepted.append((token, what))

    async def pools(self) -> tuple[ScaledPool, ...]:
        return (
            ScaledPool(POOL, self.wanted, tuple(ScaledInstance(name, ProcessPhase.RUNNING) for name in self.running)),
        )

    async def close(self) -> None:
        for instance in self.running.values():
            await instance.scope.close()


class Managers:
    """Two processes, a scaler and a Redis. ``trees``: whose sources they run, by name; else this revision's."""

    def __init__(self, redis: RedisServer, logs: Path, trees: Mapping[str, Tree] = MappingProxyType({})) -> None:
        self.redis = redis
        self._trees = trees
        self._logs = logs
        self._scaler_port, *own = ports.free(3, ())
        self.targets = dict(zip("ab", map(ports.address, own), strict=True))
        self.scaler = RecordingScaler(tuple(self.targets.values()))
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._stubs = {name: PoolManagerStub(target) for name, target in self.targets.items()}

    async def boot(self, name: str) -> None:
        tree = self._trees.get(name, THIS)
        command = tree.python("-m", "triptych.services.pool_manager", "--port", self.targets[name].rpartition(":")[2])
        told = ("--scaler", ports.address(self._scaler_port), "--autoscale", "--redis", self.redis.settings.redis)
        with (self._logs / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *command, *told, *LEASE, *QUICK, cwd=tree.root, env=tree.environment, stdout=log, stderr=log
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
        return None if status is None else next((pool.scaling for pool in status.pools if pool.role is Role.E), None)

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
