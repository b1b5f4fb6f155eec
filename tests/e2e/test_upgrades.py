"""Services of the release before beside those of this one: an upgrade and its rollback, one service at a time, under load."""

import asyncio
import base64
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import httpx
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from tests.contract.store_kit import RedisServer
from tests.e2e.client import REST_TIMEOUT_S, asked
from tests.e2e.reference import Question, answer, questions
from tests.e2e.revisions import THIS, Processes, Service, Tree, before, settings_of
from tests.integration.store.manager_kit import Managers
from triptych.domain.pool import MemberCondition
from triptych.errors import TriptychError
from triptych.rpc.stubs import PoolManagerStub

pytestmark = pytest.mark.timeout(600)

FRONT_FIRST = ("pool_manager", "gateway", "router", "encoder", "text")
"""So that the upgrade passes through a new front before old instances, and the rollback through the opposite."""
AT_LEAST = 6
"""Requests that must begin and be answered in each mixture."""
PAUSE_S = 0.15
ASKED_EACH_S = 2.0
"""The gateway of ``BEFORE`` asks for the models of a new router within a second, and fails requests if there is no other then."""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return before(tmp_path_factory.mktemp("before"))


@dataclass
class Load:
    """Questions all the time to the gateway at ``url``; every second answer is streamed. Any that is wrong ends the test."""

    url: str
    answers: list[tuple[Question, str]] = field(default_factory=list)

    async def ask(self, http: httpx.AsyncClient, question: Question, *, streamed: bool) -> None:
        self.answers.append((question, await asked(http, self.url, question.body(stream=streamed))))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(timeout=REST_TIMEOUT_S, limits=limits, trust_env=False) as http:

            async def keep_asking() -> None:
                for question, streamed in zip(cycle(questions((1, 2, 0, 4), 24)), cycle((True, False)), strict=False):
                    group.create_task(self.ask(http, question, streamed=streamed))
                    await asyncio.sleep(PAUSE_S)

            async with asyncio.TaskGroup() as group:
                asking = group.create_task(keep_asking())
                yield
                asking.cancel()
        for question, text in self.answers:
            assert text == answer(question).text, question

    async def more(self) -> None:
        """Wait until some that were asked from now on are answered."""
        known = len(self.answers) + 2 * AT_LEAST
        async with asyncio.timeout(240):
            while len(self.answers) < known:  # noqa: ASYNC110 - other tasks add them
                await asyncio.sleep(0.05)


class Cluster:
    """One process of each kind, each replaceable by one of another tree as docs/operations.md says."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.now: dict[str, Service] = {}
        self._numbers = iter(range(1, 100))

    async def start(self, kind: str, tree: Tree, *arguments: str, port: int = 0) -> Service:
        name = f"{kind.replace('_', '-')}-{next(self._numbers)}-{tree.name}"
        manager = "" if kind == "pool_manager" else self.now["pool_manager"].target
        return await self.processes.start(kind, name, tree, *settings_of(kind, name, manager), *arguments, port=port)

    @asynccontextmanager
    async def manager(self) -> AsyncIterator[PoolManagerStub]:
        stub = PoolManagerStub(self.now["pool_manager"].target)
        try:
            yield stub
        finally:
            await stub.close()

    async def conditions(self) -> dict[str, MemberCondition]:
        """Of the members that the manager knows, by name; none while it is away."""
        async with self.manager() as stub:
            try:
                pools = (await stub.status()).pools
            except TriptychError:
                return {}
        return {member.registration.instance_id: member.condition for pool in pools for member in pool.members}

    async def until_used(self, name: str) -> None:
        """Wait until the gateway's router says that an instance is ready for requests."""
        url = f"http://{self.now['gateway'].target}/ready"
        async with asyncio.timeout(240), httpx.AsyncClient(trust_env=False) as http:
            while f"{name}: ready" not in (await http.get(url)).json()["instances"]:  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.1)

    async def until(self, name: str, condition: MemberCondition) -> None:
        async with asyncio.timeout(240):
            while (await self.conditions()).get(name) is not condition:  # noqa: ASYNC110 - asked over gRPC
                await asyncio.sleep(0.1)

    async def replace(self, kind: str, tree: Tree, load: Load, *arguments: str) -> None:
        former = self.now[kind]
        if kind == "pool_manager":
            await former.end()
            self.now[kind] = await self.start(kind, tree, port=former.port)
            await self.now[kind].until_ready()
            for name in [
                service.name for service in self.now.values() if service.kind in ("router", "encoder", "text")
            ]:
                await self.until(name, MemberCondition.ACTIVE)
            return
        new = await self.start(kind, tree, *arguments)
        await new.until_ready()
        if kind == "gateway":
            self.now[kind], load.url = new, f"http://{new.target}"
        else:
            if kind == "router":
                await self.until(new.name, MemberCondition.ACTIVE)
                if self.now["gateway"].tree is not THIS:
                    await asyncio.sleep(ASKED_EACH_S)
            else:
                await self.until_used(new.name)
            async with self.manager() as stub:
                await stub.drain_instance(former.name, force=False)
            await self.until(former.name, MemberCondition.DRAINED)
            self.now[kind] = new
        await former.end()


@pytest.mark.extended
async def test_services_are_upgraded_and_rolled_back_one_by_one_without_a_failed_request(
    old: Tree, tmp_path: Path
) -> None:
    async with Processes.running(tmp_path) as processes:
        cluster = Cluster(processes)
        cluster.now["pool_manager"] = await cluster.start("pool_manager", old)
        for kind in FRONT_FIRST[1:]:
            cluster.now[kind] = await cluster.start(kind, old)
        for service in cluster.now.values():
            await service.until_ready()
        load = Load(f"http://{cluster.now['gateway'].target}")
        async with load.running():
            for tree, transport in ((THIS, "tcp"), (old, "shm")):
                for kind in FRONT_FIRST:
                    preferred = ("--prefer-transport", transport) if kind == "text" else ()
                    await cluster.replace(kind, tree, load, *preferred)
                    await load.more()
        for service in cluster.now.values():
            await service.end()
        assert processes.faults() == {}


@pytest.mark.extended
async def test_managers_of_both_releases_share_a_store_and_take_over_from_each_other(old: Tree, tmp_path: Path) -> None:
    """Sizes that are set by hand are kept from the one to the other and back."""
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        async with Managers(redis, tmp_path, {"a": old, "b": THIS}).running() as managers:
            first = await managers.leader()
            await managers.set_size(first, 3)
            await managers.until(first, lambda pool: pool.ready == 3)
            managers.processes[first].kill()
            second = await managers.leader(first)
            await managers.until(second, lambda pool: (pool.wanted, pool.ready) == (3, 3) and pool.override is not None)
            await managers.set_size(second, 1)
            await managers.until(second, lambda pool: (pool.ready, pool.draining) == (1, 0))
            await managers.processes[first].wait()
            await managers.boot(first)
            managers.processes[second].kill()
            assert await managers.leader(second) == first
            await managers.until(first, lambda pool: (pool.wanted, pool.ready) == (1, 1) and pool.override is not None)
    finally:
        redis.kill()


DESCRIBE = """
import base64, importlib, pkgutil, triptych.v1
for module in pkgutil.iter_modules(triptych.v1.__path__):
    if module.name.endswith("_pb2"):
        file = importlib.import_module(f"triptych.v1.{module.name}").DESCRIPTOR
        print(base64.b64encode(file.serialized_pb).decode())
"""


def protocol(tree: Tree) -> list[FileDescriptorProto]:
    return [FileDescriptorProto.FromString(base64.b64decode(line)) for line in tree.run(DESCRIBE).splitlines()]


def messages(within: Iterable[DescriptorProto], prefix: str = "") -> Iterator[tuple[str, DescriptorProto]]:
    for message in within:
        yield prefix + message.name, message
        yield from messages(message.nested_type, f"{prefix}{message.name}.")


def facts(tree: Tree) -> dict[str, object]:
    """What a peer relies on, by where it is."""
    found: dict[str, object] = {}
    for file in protocol(tree):
        for name, message in messages(file.message_type):
            for declared in message.field:
                of = message.oneof_decl[declared.oneof_index].name if declared.HasField("oneof_index") else ""
                found[f"field {declared.number} of {name}"] = (
                    declared.name,
                    declared.type,
                    declared.label,
                    declared.type_name,
                    of,
                )
        for enum in file.enum_type:
            found |= {f"{value.number} of {enum.name}": value.name for value in enum.value}
        for service in file.service:
            for rpc in service.method:
                streams = rpc.client_streaming, rpc.server_streaming
                found[f"rpc {service.name}.{rpc.name}"] = (rpc.input_type, rpc.output_type, *streams)
    return found


def test_the_protocol_keeps_everything_that_services_of_the_release_before_use(old: Tree) -> None:
    before_it, now = facts(old), facts(THIS)
    assert len(before_it) > 400
    assert {where: (what, now.get(where)) for where, what in before_it.items() if now.get(where) != what} == {}
