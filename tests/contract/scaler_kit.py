"""Scalers to test, over stub processes where they start some."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Protocol

import pytest

from tests.contract.kubernetes_kit import ApiServer, namespace
from tests.simulation.scaling import FaultyProcesses, OrderBook, ScalerLink, process_scaler
from triptych.cli import cluster as cluster_module
from triptych.cli import process_plan
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.decision import Bounds
from triptych.domain.scaling import PoolName, ScaledPool
from triptych.domain.stage import Role
from triptych.integrations.kubernetes.api import KubernetesApi
from triptych.integrations.kubernetes.scaler import KubernetesScaler
from triptych.machine.process_pools import RestartRules
from triptych.ports import Scaler
from triptych.rpc.scaler import SERVICE_NAME, ScalerServicer
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import ScalerStub
from triptych.runtime.tasks import TaskScope
from triptych.scaling.none import NoScaler

POOL, OTHER = PoolName(MODEL_ID, Role.E), PoolName(MODEL_ID, Role.PD)
GRACE_S = 1.0


class Switch(Protocol):
    """A file that exists or not, or what behaves like one."""

    def touch(self) -> None: ...

    def unlink(self) -> None: ...


@dataclass
class Kit:
    scaler: Scaler
    max_size: int
    broken: Switch
    """While it exists, no instance can start."""
    slow: Switch
    """While it exists, instances that start do not become ready."""
    is_alive: Callable[[str], bool]
    """Whether an instance runs, however the scaler calls it."""

    async def pool(self, name: PoolName = POOL) -> ScaledPool:
        (found,) = [pool for pool in await self.scaler.pools() if pool.name == name]
        return found

    async def until(self, condition: Callable[[ScaledPool], bool], timeout_s: float = 20) -> ScaledPool:
        """Wait until the pool is so."""
        async with asyncio.timeout(timeout_s):
            while not condition(found := await self.pool()):  # noqa: ASYNC110 - as a manager does
                await asyncio.sleep(0.02)
            return found

    async def until_gone(self, instance: str) -> None:
        async with asyncio.timeout(60):
            while self.is_alive(instance):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)


@asynccontextmanager
async def none_kit(folder: Path) -> AsyncIterator[Kit]:
    scaler = NoScaler(max_size=64)
    yield Kit(scaler, 64, folder / "broken", folder / "slow", lambda _: False)
    await scaler.close()


@asynccontextmanager
async def process_kit(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> AsyncIterator[Kit]:
    """One encoder and one text process run at the beginning."""
    monkeypatch.setattr(process_plan, "package_of", lambda service: "tests.unit.cli.stub_service")
    monkeypatch.setattr(cluster_module, "_KILL_MARGIN_S", GRACE_S)
    broken, slow = folder / "broken", folder / "slow"
    cluster = LocalCluster(
        roles="E:1,PD:1",
        options={
            "gateway": ("--instances", "encoder-1,text-1"),
            "encoder": ("--broken-if", str(broken), "--slow-if", str(slow), *options),
        },
        log_dir=folder / "logs",
        drain_s=0.0,
        restart=True,
        first_backoff_s=0.05,
    )
    async with cluster:
        yield Kit(cluster.scaler, 64, broken, slow, lambda name: name in cluster.processes)


@dataclass
class _Flag:
    """A ``Switch`` that sets an attribute."""

    owner: object
    name: str

    def touch(self) -> None:
        setattr(self.owner, self.name, True)

    def unlink(self) -> None:
        setattr(self.owner, self.name, False)


@dataclass
class _StubNode:
    is_up: bool = True

    async def stop(self, drain_s: float) -> None:
        del drain_s
        self.is_up = False

    async def kill(self) -> None:
        self.is_up = False


@asynccontextmanager
async def simulated_kit() -> AsyncIterator[Kit]:
    """The scaler of simulated clusters, over stubs, as one manager reaches it."""
    names = {POOL: "encoder-{}", OTHER: "text-{}"}
    nodes = {"encoder-1": _StubNode(), "text-1": _StubNode()}

    async def boot(role: Role, name: str) -> None:
        del role
        nodes[name] = _StubNode()

    async with TaskScope("simulated scaler") as scope:
        clock = asyncio.get_running_loop().time
        processes = FaultyProcesses(boot, nodes.get, boot_s=lambda: 0.01, scope=scope)
        scaler = process_scaler(processes, names, clock=clock, rules=RestartRules(first_backoff_s=0.05))
        for pool, name in zip(names, tuple(nodes), strict=True):
            scaler.adopt(str(pool), (name,))
        scope.spawn(scaler.run(), name="scaler")
        book = OrderBook(Bounds(0, 64), clock=clock, works=lambda _: False)
        link = ScalerLink("manager", scaler, book, rng=Random(0), scope=scope)
        yield Kit(link, 64, _Flag(processes, "crashes"), _Flag(processes, "slow"), processes.is_alive)
        assert not book.violations, book.violations
        await scaler.close()


@asynccontextmanager
async def remote_kit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kit]:
    """The scaler of processes, over gRPC."""
    async with process_kit(folder, monkeypatch) as kit, served(kit.scaler) as stub:
        yield replace(kit, scaler=stub)


@asynccontextmanager
async def served(scaler: Scaler, *, port: int = 0, timeout_s: float = 10) -> AsyncIterator[ScalerStub]:
    register = ScalerServicer(scaler).register
    async with RpcServer(host="127.0.0.1", port=port, service_names=(SERVICE_NAME,), register=register) as server:
        stub = ScalerStub(f"127.0.0.1:{server.port}", timeout_s=timeout_s)
        yield stub
        await stub.close()


@asynccontextmanager
async def kubernetes_kit(folder: Path, url: str, ca_file: Path) -> AsyncIterator[Kit]:
    """Deployments of one pod each."""
    server = ApiServer(url, ca_file)
    deployments = {POOL: "triptych-encoder", OTHER: "triptych-text"}
    async with server.admin, namespace(server, folder, tuple(deployments.values())) as (controllers, settings):
        api = KubernetesApi(settings)
        scaler = KubernetesScaler(api, deployments, max_size=64, interval_s=0.1)
        async with asyncio.TaskGroup() as group:
            group.create_task(scaler.run())
            yield Kit(scaler, 64, folder / "broken", folder / "slow", lambda name: name in controllers.alive)
            await scaler.close()
        await api.close()
