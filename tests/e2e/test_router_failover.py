"""Two of each kind of service: kill -9 of routers and gateways in the middle of streams, and a rolling restart under load."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.client import REST_TIMEOUT_S, post, text_of
from tests.e2e.reference import DIGITS, Question, answer, questions
from tests.e2e.revisions import THIS, Processes, Service
from tests.e2e.test_continuations import QUESTION, TOKENS, Streamed, stream, timeline
from triptych import AsyncClient
from triptych.demo import MODEL_DIR, MODEL_ID
from triptych.domain.pool import MemberCondition
from triptych.errors import NotFound
from triptych.rpc.stubs import PoolManagerStub, RouterStub

pytestmark = [pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

POSITIONS = (1, TOKENS)
"""Of all tokens of both choices: where the router is killed."""
PAUSE_S = 0.4
"""Between the requests of the load."""
LONGEST_ANSWER_S = 60
"""On a busy machine. A gateway that drains waits so long for a stream, which nobody else can go on with."""
STREAM_EVERY = 20
"""Requests of the load for one long stream."""
CHEAP = {"pool_manager", "router", "gateway"}
"""Kinds that start in a second. Of the others one is restarted."""
KINDS = {"pool_manager": 1, "router": 2, "gateway": 2, "encoder": 2, "text": 2}


@dataclass
class Site:
    """The processes, by name (``router-0``)."""

    processes: Processes
    services: dict[str, Service] = field(default_factory=dict)

    async def start(self, kind: str, name: str, port: int = 0) -> None:
        arguments: list[str] = []
        if kind != "pool_manager":
            arguments += ["--pool-manager", self.services["pool_manager-0"].target]
        if kind == "gateway":
            arguments += ["--drain-s", str(LONGEST_ANSWER_S)]
        if kind in ("router", "encoder", "text"):
            arguments += ["--instance-id", name, "--model", str(MODEL_DIR), "--model-id", MODEL_ID]
        if kind in ("encoder", "text"):
            arguments += ["--torch-threads", "1"]
        self.services[name] = await self.processes.start(kind, name, THIS, *arguments, port=port)

    def of(self, kind: str) -> list[Service]:
        return [service for service in self.services.values() if service.kind == kind]

    @property
    def routers(self) -> str:
        return ",".join(router.target for router in self.of("router"))

    async def kill_router_of(self, request_id: str) -> None:
        """The one that has the request."""
        for router in self.of("router"):
            stub = RouterStub(router.target)
            try:
                await stub.timeline(request_id)
            except NotFound:
                continue
            finally:
                await stub.close()
            router.process.kill()
            await router.process.wait()
            return
        raise AssertionError(f"no router has {request_id}")

    async def heal(self) -> None:
        """Start again what was killed, and wait until all are ready."""
        for name, service in list(self.services.items()):
            if service.process.returncode is not None:
                await self.start(service.kind, name, service.port)
        for service in self.services.values():
            await service.until_ready()

    async def restart(self, name: str) -> None:
        """As an operator does: it drains and ends, and is back at its address before the next one goes."""
        former = self.services[name]
        await former.end()
        await self.start(former.kind, name, former.port)
        await self.services[name].until_ready()
        if former.kind == "pool_manager":
            await self._until_all_are_members()
        elif former.kind in ("encoder", "text"):
            for gateway in self.of("gateway"):
                await self._until_used(name, gateway)

    async def _until_used(self, name: str, gateway: Service) -> None:
        async with asyncio.timeout(240), httpx.AsyncClient(trust_env=False) as http:
            while f"{name}: ready" not in (await http.get(f"http://{gateway.target}/ready")).json()["instances"]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def _until_all_are_members(self) -> None:
        wanted = {name for name, service in self.services.items() if service.kind in ("router", "encoder", "text")}
        stub = PoolManagerStub(self.services["pool_manager-0"].target)
        try:
            async with asyncio.timeout(240):
                active: set[str] = set()
                while active != wanted:
                    await asyncio.sleep(0.1)
                    members = [member for pool in (await stub.status()).pools for member in pool.members]
                    active = {
                        member.registration.instance_id
                        for member in members
                        if member.condition is MemberCondition.ACTIVE
                    }
        finally:
            await stub.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    asyncio.get_running_loop().set_debug(False)  # debug mode would take most of the clients' time
    async with Processes.running(tmp_path_factory.mktemp("logs")) as processes:
        made = Site(processes)
        for kind, number in KINDS.items():
            for place in range(number):
                await made.start(kind, f"{kind}-{place}")
        await made.heal()
        yield made
        for service in made.services.values():
            if service.process.returncode is None:
                service.process.terminate()
        assert processes.faults() == {}


async def nothing(request_id: str, tokens: int) -> None:
    """The reference is an answer that nothing happens to."""


def client_of(gateway: Service) -> httpx.AsyncClient:
    """A connection of its own for each user."""
    return httpx.AsyncClient(
        base_url=f"http://{gateway.target}",
        timeout=REST_TIMEOUT_S,
        trust_env=False,
        verify=False,  # noqa: S501 - no TLS, and reading all authorities takes longer than a request
    )


def check_same(got: Streamed, whole: Streamed) -> None:
    assert (got.texts, got.reasons, got.usage) == (whole.texts, whole.reasons, whole.usage)
    for choice, tokens in whole.tokens.items():
        assert [token for token, _ in got.tokens[choice]] == [token for token, _ in tokens]
        assert [logprob for _, logprob in got.tokens[choice]] == pytest.approx(
            [logprob for _, logprob in tokens], abs=1e-3
        )


async def test_a_stream_through_a_gateway_goes_on_when_its_router_is_killed(site: Site) -> None:
    async with client_of(site.of("gateway")[0]) as client:
        whole = await stream(client, nothing)
        assert {choice: len(tokens) for choice, tokens in whole.tokens.items()} == {0: TOKENS, 1: TOKENS}
        for position in POSITIONS:
            await site.heal()
            killed: list[str] = []

            async def kill(request_id: str, tokens: int, killed: list[str] = killed, at: int = position) -> None:
                if tokens >= at and not killed:
                    killed.append(request_id)
                    await site.kill_router_of(request_id)

            check_same(await stream(client, kill), whole)
            told = await timeline(client, killed[0])
            assert (told["outcome"], told["continuations"]) == ("done", 1)
            assert position <= told["continued_tokens"] < told["completion_tokens"] == 2 * TOKENS
        metrics = (await client.get("/metrics")).text
        assert f"triptych_gateway_continuations_total {len(POSITIONS)}.0" in metrics


@pytest.mark.extended
async def test_a_stream_of_the_sdk_goes_on_when_its_router_is_killed(site: Site) -> None:
    await site.heal()
    images = [DIGITS / f"{name}.png" for name in QUESTION.images]
    options: dict[str, Any] = {"temperature": 1.2, "seed": 11, "n": 2, "max_tokens": TOKENS, "ignore_eos": True}
    async with AsyncClient(site.routers) as client:
        whole = await client.chat(QUESTION.text, images, logprobs=0, **options)
        for position in POSITIONS[1:]:
            await site.heal()
            seen, chunks = 0, []
            async with client.stream(QUESTION.text, images, logprobs=0, **options) as streamed:
                async for chunk in streamed:
                    chunks.append(chunk)
                    if seen < position <= seen + len(chunk.token_ids):
                        await site.kill_router_of(streamed.request_id)
                    seen += len(chunk.token_ids)
            assert streamed.usage == whole.usage
            for number, choice in enumerate(whole.choices):
                mine = [chunk for chunk in chunks if chunk.choice == number]
                assert "".join(chunk.text for chunk in mine) == choice.text
                assert tuple(token for chunk in mine for token in chunk.token_ids) == choice.token_ids
                said = [token.chosen.logprob for chunk in mine for token in chunk.logprobs]
                assert said == pytest.approx([token.chosen.logprob for token in choice.logprobs], abs=1e-3)


@pytest.mark.extended
async def test_a_killed_gateway_fails_only_its_own_connections(site: Site) -> None:
    """Clients of that gateway ask again at the other one; the streams of that one go on."""
    await site.heal()
    lost, kept = site.of("gateway")
    running = asyncio.Event()

    async def began(request_id: str, tokens: int) -> None:
        if tokens:
            running.set()

    async def lose() -> None:
        with pytest.raises(httpx.TransportError):
            await stream(first, began)

    async with client_of(lost) as first, client_of(kept) as second:
        async with asyncio.TaskGroup() as group:
            group.create_task(lose())
            others = [group.create_task(stream(second, nothing)) for _ in range(2)]
            await running.wait()
            lost.process.kill()
        whole, other = (task.result() for task in others)
        check_same(other, whole)
        with pytest.raises(httpx.TransportError):
            await stream(first, nothing)
        check_same(await stream(second, nothing), whole)


@dataclass
class Load:
    """Requests all the time, through both gateways in turn: to the other one where the connection is refused, as a load
    balancer does. Any error or wrong answer ends the test.
    """

    site: Site
    answered: int = 0
    streamed: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        whole = await self._stream(0)

        async def keep_asking() -> None:
            asked = questions((1, 0, 2), 12)
            for number in count():
                group.create_task(self._ask(number, asked[number % len(asked)]))
                if not number % STREAM_EVERY:
                    group.create_task(self._check_stream(number, whole))
                await asyncio.sleep(PAUSE_S)

        async with asyncio.TaskGroup() as group:
            asking = group.create_task(keep_asking())
            yield
            asking.cancel()

    async def _ask(self, number: int, question: Question) -> None:
        for gateway in self._gateways(number):
            async with client_of(gateway) as client:
                try:
                    response = await post(client, question.body())
                except httpx.ConnectError:
                    continue
            assert text_of(response) == answer(question).text
            self.answered += 1
            return
        raise AssertionError("both gateways refuse connections")

    async def _stream(self, number: int) -> Streamed:
        for gateway in self._gateways(number):
            async with client_of(gateway) as client:
                try:
                    return await stream(client, nothing)
                except httpx.ConnectError:
                    continue
        raise AssertionError("both gateways refuse connections")

    async def _check_stream(self, number: int, whole: Streamed) -> None:
        check_same(await self._stream(number), whole)
        self.streamed += 1

    def _gateways(self, number: int) -> list[Service]:
        gateways = self.site.of("gateway")
        return gateways if number % 2 else gateways[::-1]


@pytest.mark.extended
async def test_routers_that_are_killed_in_turn_under_load_cost_no_answer(site: Site) -> None:
    """Neither through a gateway nor through the SDK."""
    await site.heal()
    load, question = Load(site), questions((2,), 1)[0]
    images = [DIGITS / f"{name}.png" for name in question.images]
    answered = 0

    async def keep_asking(client: AsyncClient) -> None:
        nonlocal answered
        while True:
            got = await client.chat(question.text, images, temperature=0, max_tokens=question.max_tokens)
            assert got.text == answer(question).text
            answered += 1

    async with AsyncClient(site.routers) as client, load.running(), asyncio.TaskGroup() as group:
        asking = group.create_task(keep_asking(client))
        for router in site.of("router"):
            before = load.answered, answered
            router.process.kill()
            await router.process.wait()
            async with asyncio.timeout(240):
                while load.answered < before[0] + 2 or answered < before[1] + 2:  # noqa: ASYNC110 - other tasks count
                    await asyncio.sleep(0.05)
            await site.heal()
        asking.cancel()


@pytest.mark.extended
async def test_every_service_is_restarted_under_load_without_a_failed_request(site: Site) -> None:
    await site.heal()
    load = Load(site)
    async with load.running():
        for kind in KINDS:
            services = site.of(kind)
            for service in services if kind in CHEAP else services[:1]:
                before = load.answered
                await site.restart(service.name)
                async with asyncio.timeout(240):
                    while load.answered < before + 2:  # noqa: ASYNC110 - other tasks count
                        await asyncio.sleep(0.05)
    assert load.answered >= 2 * len(KINDS)
    assert load.streamed >= 1
