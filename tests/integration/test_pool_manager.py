"""Members and watchers of a pool manager over real gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from tests.loaded import LoadedProcess
from tests.unit.services.gateway.fakes import FakeRouter
from triptych.cli import ports
from triptych.domain.embedding import DType
from triptych.domain.instance import InstanceLoad, ModelInfo, StageLoad
from triptych.domain.membership import Member, MemberKind, MemberState
from triptych.domain.pool import ManualSize, Registration
from triptych.domain.stage import Role, Stage
from triptych.errors import InvalidRequest, NotFound
from triptych.machine.membership_view import ViewLimits
from triptych.machine.pool_manager.members import MemberLimits
from triptych.rpc.registered import registered
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import PoolManagerStub
from triptych.runtime.clock import monotonic
from triptych.runtime.managed_membership import ManagedMembership
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.services.gateway.app import app as gateway_app
from triptych.services.gateway.settings import GatewaySettings
from triptych.services.pool_manager.app import app
from triptych.services.pool_manager.service import PoolManagerService
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.servicer import SERVICE_NAME, RouterServicer
from triptych.services.router.settings import RouterSettings

QUICK = MemberLimits(suspect_s=0.5, remove_s=1.0, tick_s=0.1)
LOAD = InstanceLoad({Stage.ENCODE: StageLoad(5, 1, 7)})


@asynccontextmanager
async def manager(port: int) -> AsyncGenerator[PoolManagerService]:
    async with app(PoolManagerSettings(port=port, members=QUICK, drain_s=0)) as running:
        yield running.service
        running.service.validate()
        await running.drain()


def access(port: int) -> ManagerAccess:
    return ManagerAccess((ports.address(port),), heartbeat_s=0.2, manager_retry_max_s=0.2)


class Instance(LoadedProcess):
    """An instance's service and app."""

    def __init__(self, port: int) -> None:
        super().__init__(LOAD.stages)
        self.port = port


@asynccontextmanager
async def member(manager_port: int, port: int) -> AsyncGenerator[Instance]:
    instance = Instance(port)
    settings = RouterSettings(managers=access(manager_port))

    async def introduce(address: str) -> Registration:
        told = Registration(MemberKind.INSTANCE, f"i{port}", 2**63, address, "m", "r", Role.E, 5, 6, 7, ("shm",))
        assert address == ports.address(port)
        return told

    async with registered(settings, instance, introduce, instance, telemetry=Telemetry(), tls=None):
        yield instance


@asynccontextmanager
async def watching(manager_port: int) -> AsyncGenerator[dict[str, Member]]:
    """What a watcher knows, as it changes."""
    known: dict[str, Member] = {}
    source = ManagedMembership(PoolManagerStub, access(manager_port), ViewLimits(0.5), clock=monotonic, name="w")

    async def follow() -> None:
        async with aclosing(source.snapshots()) as snapshots:
            async for snapshot in snapshots:
                known.clear()
                known.update((listed.address, listed) for listed in snapshot.members)

    async with TaskScope("watcher") as scope:
        scope.spawn(follow(), name="follow")
        yield known


def _has(service: PoolManagerService, members: int) -> bool:
    return len(service._machine) == members


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - other tasks change it
            await asyncio.sleep(0.02)


async def test_members_join_are_shown_drain_and_leave() -> None:
    port, first_port, second_port = ports.free(3, ())
    first, second = ports.address(first_port), ports.address(second_port)
    async with manager(port) as service, watching(port) as known:
        stub = PoolManagerStub(ports.address(port))
        async with member(port, first_port) as instance, member(port, second_port):
            await until(lambda: len(known) == 2)
            assert known[first] == Member(first, role=Role.E, model="m", epoch=2**63)
            (pool,) = (await stub.status()).pools
            assert (pool.model, pool.role, len(pool.members)) == ("m", Role.E, 2)
            await until(
                lambda: all(
                    known_member.load == LOAD for pool in service._machine.pools(0) for known_member in pool.members
                )
            )
            await stub.drain_instance(f"i{first_port}", force=False)
            with pytest.raises(NotFound):
                await stub.drain_instance("unknown", force=False)
            await until(lambda: known[first].state is MemberState.LEAVING)
            assert known[second].state is MemberState.ACTIVE
            await until(lambda: instance.draining)
            await until(service.control.status)
            await stub.set_size(ManualSize("m", Role.E, 2, 60.0))
            scaling = (await stub.status()).pools[0].scaling
            assert scaling is not None
            assert scaling.override is not None
            assert scaling.override.size == 2
            with pytest.raises(InvalidRequest, match="size"):
                await stub.set_size(ManualSize("m", Role.E, 65, 60.0))
            with pytest.raises(InvalidRequest, match="for_s"):
                await stub.set_size(ManualSize("m", Role.E, 2, 1e9))
        await until(lambda: not known)
        assert not any(pool.members for pool in (await stub.status()).pools)
        await stub.close()


async def test_a_manager_that_goes_and_comes_back_empty_takes_no_member_away() -> None:
    port, first_port, second_port = ports.free(3, ())
    async with watching(port) as known, member(port, first_port):
        async with manager(port), member(port, second_port):
            await until(lambda: len(known) == 2)
        before = dict(known)
        await asyncio.sleep(0.5)
        assert known == before
        async with manager(port) as service:
            await until(lambda: len(service._machine) == 1)
            await until(lambda: not known[ports.address(first_port)].suspected)


async def test_a_gateway_finds_routers_and_their_models_through_the_manager() -> None:
    port, first_port, second_port = ports.free(3, ())
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(manager(port))
        settings = GatewaySettings(port=0, managers=access(port))
        gateway = await stack.enter_async_context(gateway_app(settings))
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=60))

        async def models() -> list[str]:
            answer = await http.get(f"http://127.0.0.1:{gateway.port}/v1/models")
            return [model["id"] for model in answer.json()["data"]]

        assert await models() == []
        for own, model in ((first_port, "m1"), (second_port, "m2")):
            router = FakeRouter()
            router.models_answer = partial(_named, model)
            register = RouterServicer(router).register
            server = RpcServer(host="127.0.0.1", port=own, service_names=[SERVICE_NAME], register=register)
            await stack.enter_async_context(server)

            async def introduce(address: str, model: str = model) -> Registration:
                return Registration(MemberKind.ROUTER, model, 1, address, model)

            told = RouterSettings(managers=access(port))
            instance = Instance(own)
            await stack.enter_async_context(
                registered(told, instance, introduce, instance, telemetry=Telemetry(), tls=None)
            )
        await until(lambda: service.members_by_state() == {("", "active"): 2})
        async with asyncio.timeout(60):
            while await models() != ["m1", "m2"]:  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.05)
        metrics = (await http.get(f"http://127.0.0.1:{gateway.port}/metrics")).text
        samples = {line.split()[0]: float(line.split()[1]) for line in metrics.splitlines() if line[:1] != "#"}
        assert samples["triptych_membership_stale"] == 0
        assert samples["triptych_membership_version"] >= 1
        assert samples["triptych_membership_age_seconds"] < 20
        ask = {"model": "m2", "messages": [{"role": "user", "content": "Hi"}]}
        answer = await http.post(f"http://127.0.0.1:{gateway.port}/v1/chat/completions", json=ask)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello"


def _named(model: str) -> tuple[ModelInfo, ...]:
    return (ModelInfo(model, "r", DType.F32, 8, 128),)


@pytest.mark.extended
async def test_many_members_reconnect_at_once() -> None:
    port, *several = ports.free(31, ())
    async with watching(port) as known, asyncio.TaskGroup() as group:
        ended = asyncio.Event()

        async def live(own: int) -> None:
            async with member(port, own):
                await ended.wait()

        for own in several:
            group.create_task(live(own))
        for _ in range(3):
            async with manager(port) as service:
                await until(partial(_has, service, len(several)))
                await until(lambda: len(known) == len(several))
        ended.set()
