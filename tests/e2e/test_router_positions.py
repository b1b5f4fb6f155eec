"""kill -9 of the router that serves an answer, before its first token and after each other, through REST and the SDK."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.client import rest
from tests.e2e.held_text import held
from tests.e2e.reference import DIGITS, Question
from tests.e2e.revisions import THIS, Processes, Service, settings_of
from tests.e2e.test_continuations import stream, timeline
from tests.e2e.test_router_failover import check_same, nothing
from triptych import AsyncClient
from triptych.cli import ports

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

TOKENS = 16
ROUTERS = 3
"""One serves, one goes on, and one is being started again."""
WITHIN_S = 120.0
QUESTION = Question("What digits are shown?", ("9_c", "3_a"), max_tokens=TOKENS)
OPTIONS: dict[str, Any] = {"temperature": 1.2, "seed": 11, "ignore_eos": True, "frequency_penalty": 0.3}
BODY = QUESTION.body(**OPTIONS, logprobs=True, top_logprobs=1, stream=True) | {
    "stream_options": {"include_usage": True}
}


@dataclass
class Site:
    """Several routers and one engine, which waits before a given token until the router has been killed."""

    processes: Processes
    limit: Path
    manager: Service
    gateway: Service
    routers: dict[str, Service] = field(default_factory=dict)
    starting: list[str] = field(default_factory=list)
    """Routers that have not been waited for, in the order of their starts."""

    async def start_router(self, name: str, port: int = 0) -> None:
        settings = settings_of("router", name, self.manager.target)
        self.routers[name] = await self.processes.start("router", name, THIS, *settings, port=port)
        self.starting.append(name)

    async def until_ready(self, number: int) -> None:
        """As many routers."""
        while len(self.routers) - len(self.starting) < number:
            await self.routers[self.starting[0]].until_ready()
            self.starting.pop(0)

    def hold(self, tokens: int) -> None:
        """Let no answer have more tokens."""
        held(self.limit).unlink(missing_ok=True)
        written = self.limit.with_suffix(".written")
        written.write_text(str(tokens))
        written.replace(self.limit)

    @asynccontextmanager
    async def router_killed_at(self, position: int) -> AsyncIterator[Callable[[int], None]]:
        """Kills the router of the only request once its caller has so many tokens. Yields what tells how many it has."""
        arrived = asyncio.Event()

        def has(tokens: int) -> None:
            if tokens >= position:
                arrived.set()

        async def kill() -> None:
            async with asyncio.timeout(WITHIN_S):
                while not held(self.limit).exists():  # noqa: ASYNC110 - another process makes it
                    await asyncio.sleep(0.005)
                await arrived.wait()
            await self._kill_the_one_that_serves()
            self.hold(TOKENS)

        await self.until_ready(2)
        self.hold(position)
        has(0)
        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            yield has

    async def _kill_the_one_that_serves(self) -> None:
        (router,) = [router for router in self.routers.values() if await _serves(router)]
        router.process.kill()
        await router.process.wait()
        await self.start_router(router.name, router.port)


async def _serves(router: Service) -> bool:
    async with httpx.AsyncClient(trust_env=False) as http:
        try:
            metrics = (await http.get(f"http://{ports.address(router.admin_port)}/metrics")).text
        except httpx.TransportError:  # it is being started
            return False
    return "\ntriptych_requests_running 1.0\n" in metrics


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    asyncio.get_running_loop().set_debug(False)  # debug mode would take most of the clients' time
    directory = tmp_path_factory.mktemp("held")
    async with Processes.running(tmp_path_factory.mktemp("logs")) as processes:
        manager = await processes.start("pool_manager", "pool_manager", THIS)
        gateway = await processes.start("gateway", "gateway", THIS, *settings_of("gateway", "gateway", manager.target))
        made = Site(processes, directory / "limit", manager, gateway)
        made.hold(TOKENS)
        told = (*settings_of("text", "text", manager.target), "--role", "EPD")
        module = "tests.e2e.held_text"
        text = await processes.start("text", "text", THIS, str(made.limit), *told, module=module)
        for number in range(ROUTERS):
            await made.start_router(f"router-{number}")
        for service in (text, gateway):
            await service.until_ready()
        await made.until_ready(ROUTERS)
        yield made
        await made.until_ready(ROUTERS)
        assert processes.faults() == {}


async def test_a_stream_through_a_gateway_goes_on_from_every_position(site: Site) -> None:
    async with rest(f"http://{site.gateway.target}") as client:
        whole = await stream(client, nothing, BODY)
        assert {choice: len(tokens) for choice, tokens in whole.tokens.items()} == {0: TOKENS}
        for position in range(TOKENS):
            request_ids: set[str] = set()
            async with site.router_killed_at(position) as has:

                async def tell(
                    request_id: str, tokens: int, has: Callable[[int], None] = has, ids: set[str] = request_ids
                ) -> None:
                    ids.add(request_id)
                    has(tokens)

                check_same(await stream(client, tell, BODY), whole)
            told = await timeline(client, *request_ids)
            assert (told["outcome"], told["continued_tokens"]) == ("done", position)
        metrics = (await client.get("/metrics")).text
        assert f"triptych_gateway_continuations_total {TOKENS - 1}.0" in metrics, "without output it is repeated"


async def test_a_stream_of_the_sdk_goes_on_from_every_position(site: Site) -> None:
    images = [DIGITS / f"{name}.png" for name in QUESTION.images]
    routers = ",".join(router.target for router in site.routers.values())
    async with AsyncClient(routers) as client:
        whole = await client.chat(QUESTION.text, images, logprobs=0, max_tokens=TOKENS, **OPTIONS)
        (choice,) = whole.choices
        assert len(choice.token_ids) == TOKENS
        for position in range(TOKENS):
            token_ids, logprobs, text = list[int](), list[float](), ""
            asked = client.stream(QUESTION.text, images, logprobs=0, max_tokens=TOKENS, **OPTIONS)
            async with site.router_killed_at(position) as has, asked as streamed:
                async for chunk in streamed:
                    text += chunk.text
                    token_ids += chunk.token_ids
                    logprobs += [token.chosen.logprob for token in chunk.logprobs]
                    has(len(token_ids))
            assert (text, tuple(token_ids), streamed.usage) == (choice.text, choice.token_ids, whole.usage)
            assert logprobs == pytest.approx([token.chosen.logprob for token in choice.logprobs], abs=1e-3)
            told = await client.timeline(streamed.request_id)
            assert told.continued_tokens == position
