"""Several routers as one: the choice by model, failover, and what is shown of them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.services.gateway.fakes import HELLO, MODEL, FakeRouter
from triptych.domain.chat import ChatRequest
from triptych.domain.generation import ChatEvent, TokenChunk
from triptych.domain.instance import ModelInfo
from triptych.domain.membership import Member, MemberKind, MembershipSnapshot, MemberState
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.sampling import SamplingParams
from triptych.domain.timeline import Readiness
from triptych.errors import InstanceLost, ModelNotFound, NotFound, Unavailable
from triptych.machine.router_attempts import RESTART_S
from triptych.rpc.routers import Routers
from triptych.runtime.tasks import TaskScope
from triptych.virtual import virtual_time
from triptych.wire.status import LOST

OTHER = replace(MODEL, model_id="other")


class Client(FakeRouter):
    """A router at an address."""

    def __init__(self) -> None:
        super().__init__()
        self.resolves: list[ResolveRequest] = []
        self.refused = False
        self.connected = False
        self.continues = True
        self.is_closed = False
        self.served: tuple[ModelInfo, ...] | Exception = (MODEL,)
        self.lookups = 0
        self.hangs: asyncio.Event | None = None
        self.knows_keys = False

    async def resolve(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        self.resolves.append(request)
        if isinstance(self.script[0], Exception):
            raise self.script[0]
        if request.keys and not self.knows_keys:
            raise NotFound("no such key")
        yield ()

    async def models(self) -> tuple[ModelInfo, ...]:
        self.lookups += 1
        if self.hangs is not None:
            await self.hangs.wait()
        if isinstance(self.served, Exception):
            raise self.served
        return self.served

    def goes_away(self) -> None:
        """Nothing listens at the address any more."""
        lost = InstanceLost(LOST)
        self.refused, self.served, self.script, self.readiness_answer = True, lost, [lost], lost

    async def close(self) -> None:
        self.is_closed = True


class Site:
    def __init__(self, **models: ModelInfo) -> None:
        self.clients: dict[str, Client] = {}
        self.routers = Routers(self.connect)
        self._models = models
        self.routers.use(models)

    def connect(self, address: str) -> Client:
        client = self.clients[address] = Client()
        client.served = (self._models[address],)
        return client

    async def chat(self, name: str, model: str = "demo") -> list[ChatEvent]:
        async with aclosing(self.routers.chat(request(name, model))) as answer:
            return [event async for events in answer for event in events]

    @property
    def counts(self) -> dict[str, int]:
        """Requests that each router got."""
        return {address: len(client.requests) for address, client in self.clients.items()}


def request(name: str = "r", model: str = "demo") -> ChatRequest:
    return ChatRequest(name, model, (), SamplingParams(), 5.0)


async def site(**models: ModelInfo) -> Site:
    made = Site(**models)
    await made.routers.ask()
    return made


async def test_a_request_goes_to_a_router_of_its_model() -> None:
    here = await site(a=MODEL, b=OTHER)
    assert tuple(await here.chat("1", "other")) == HELLO
    assert here.counts == {"a": 0, "b": 1}
    assert [model.model_id for model in await here.routers.models()] == ["demo", "other"]
    with pytest.raises(ModelNotFound, match="'third' is not served"):
        await here.chat("2", "third")


async def test_routers_of_one_model_take_turns_and_the_one_with_fewer_calls_comes_first() -> None:
    here = await site(a=MODEL, b=MODEL)
    for number in range(4):
        await here.chat(str(number))
    assert here.counts == {"a": 2, "b": 2}
    held = asyncio.Event()
    here.clients["a"].script = here.clients["b"].script = [TokenChunk((1,), "x"), held, *HELLO]
    async with aclosing(here.routers.chat(request("long"))) as answer:
        await anext(answer)
        busy = "a" if here.counts["a"] == 3 else "b"
        here.clients["a"].script = here.clients["b"].script = HELLO
        for number in range(3):
            await here.chat(f"short {number}")
        assert here.counts[busy] == 3


@pytest.mark.parametrize("error", [Unavailable("the router is shutting down"), InstanceLost("refused")], ids=str)
async def test_a_request_that_a_router_did_not_take_goes_to_the_next(error: Unavailable) -> None:
    here = await site(a=MODEL, b=MODEL)
    here.clients["a"].script, here.clients["a"].refused = [error], True
    for number in range(3):
        assert tuple(await here.chat(str(number))) == HELLO
        assert (await here.routers.tokenize(request())).token_ids == (5, 6, 7)


async def test_a_request_that_was_sent_and_lost_before_its_first_event_is_repeated() -> None:
    here = await site(a=MODEL, b=MODEL)
    here.clients["a"].script = [InstanceLost("cut")]
    for number in range(3):
        assert tuple(await here.chat(str(number))) == HELLO


async def test_an_only_router_is_asked_whatever_it_is_not_known_for() -> None:
    """So its own errors are seen, and nothing waits until it has named its models."""
    here = Site(a=MODEL)
    await here.routers.asked()
    assert tuple(await here.chat("1")) == HELLO
    assert await here.routers.models() == (MODEL,)
    here.clients["a"].script = [ModelNotFound("'third' is not served here")]
    with pytest.raises(ModelNotFound, match="served here"):
        await here.chat("2", "third")
    here.clients["a"].goes_away()
    for ask_it in (here.chat("3"), here.routers.models(), here.routers.readiness()):
        with pytest.raises(Unavailable, match=r"^no router answers$") as caught:
            await ask_it
        assert (type(caught.value), caught.value.retry_after_s) == (Unavailable, 1.0)
    here.clients["a"].served = InstanceLost("the TLS handshake failed")
    with pytest.raises(InstanceLost, match="TLS"):
        await here.routers.models()
    assert here.routers.unreached


async def test_an_error_that_a_router_reports_after_the_first_event_is_the_answer_s() -> None:
    here = await site(a=MODEL, b=MODEL)
    for client in here.clients.values():
        client.script = [TokenChunk((1,), "x"), Unavailable("late")]
    with pytest.raises(Unavailable, match="late"):
        await here.chat("1")
    assert sum(here.counts.values()) == 1


async def test_the_last_router_s_refusal_is_the_answer() -> None:
    here = await site(a=MODEL, b=MODEL)
    here.clients["a"].script = here.clients["b"].script = [Unavailable("no text instance")]
    with pytest.raises(Unavailable, match="no text instance"):
        await here.chat("1")
    assert here.counts == {"a": 1, "b": 1}


def test_a_request_that_reaches_no_router_waits_a_moment_for_one_of_several() -> None:
    """As when they are killed in turn: the first is back, and the connection to it is not yet."""

    async def test() -> None:
        here = await site(a=MODEL, b=MODEL)
        for client in here.clients.values():
            client.goes_away()

        async def comes_back() -> None:
            await asyncio.sleep(RESTART_S / 2)
            here.clients["a"].refused, here.clients["a"].script = False, HELLO

        async with asyncio.TaskGroup() as group:
            group.create_task(comes_back())
            assert tuple(await here.chat("1")) == HELLO
        here.clients["a"].goes_away()
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable, match=r"^no router answers$") as caught:
            await here.chat("2")
        assert (type(caught.value), caught.value.retry_after_s) == (Unavailable, 1.0)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(RESTART_S, abs=0.1)

    virtual_time.run(test())


@pytest.mark.parametrize("begun", [True, False], ids=["in the answer", "before it"])
def test_the_loss_of_all_routers_that_had_the_request_is_told_of_a_router(*, begun: bool) -> None:
    async def test() -> None:
        here = await site(a=MODEL, b=MODEL)
        for client in here.clients.values():
            client.script = [*([TokenChunk((1,), "x")] if begun else []), InstanceLost(LOST)]
            client.served = InstanceLost(LOST)
        with pytest.raises(InstanceLost, match=r"^the connection to the router was lost$"):
            await here.chat("1")

    virtual_time.run(test())


async def test_an_instance_that_a_router_lost_is_told_as_the_router_does() -> None:
    here = await site(a=MODEL, b=MODEL)
    told = InstanceLost(LOST)
    told.sent_by_peer = True
    for client in here.clients.values():
        client.script = [told]
    with pytest.raises(InstanceLost, match=LOST):
        await here.chat("1")


async def test_a_router_that_does_not_answer_is_chosen_last_and_keeps_its_models() -> None:
    here = await site(a=MODEL, b=MODEL, c=OTHER)
    for address in ("a", "c"):
        here.clients[address].goes_away()
    await here.routers.ask()
    for number in range(3):
        await here.chat(str(number))
    assert here.counts == {"a": 0, "b": 3, "c": 0}
    assert [model.model_id for model in await here.routers.models()] == ["demo", "other"]
    with pytest.raises(Unavailable, match="no router answers"):
        await here.chat("4", "other")


async def test_without_any_router_that_ever_answered_requests_are_to_be_repeated() -> None:
    here = Site(a=MODEL, b=MODEL)
    with pytest.raises(Unavailable, match="no router is connected yet"):
        await here.chat("1")
    assert await here.routers.readiness() == Readiness(ready=False, missing=("router",))
    assert await Site().routers.models() == ()


async def test_a_timeline_is_found_at_whichever_router_had_the_request() -> None:
    here = await site(a=MODEL, b=MODEL, c=OTHER)
    for name in ("1", "2"):
        await here.chat(name)
        assert (await here.routers.timeline(name)).request_id == name
    with pytest.raises(NotFound):
        await here.routers.timeline("3")


async def test_it_is_ready_when_every_model_has_a_router_that_is() -> None:
    here = await site(a=MODEL, b=MODEL, c=OTHER)
    here.clients["a"].readiness_answer = Readiness(ready=False, missing=("encode",), instances=("t: ready",))
    found = await here.routers.readiness()
    assert (found.ready, found.missing) == (True, ())
    assert found.instances == ("t: ready", "encoder-1", "text-1")
    here.clients["c"].readiness_answer = InstanceLost("gone")
    found = await here.routers.readiness()
    assert (found.ready, found.missing) == (False, ("router of other",))


async def test_a_router_that_is_ready_is_known_with_its_models_at_once() -> None:
    """A router names none before it has seen an instance."""
    here = Site(a=MODEL, b=OTHER)
    here.clients["a"].served = ()
    await here.routers.ask()
    here.clients["a"].served = (MODEL,)
    assert (await here.routers.readiness()).ready
    assert [model.model_id for model in await here.routers.models()] == ["demo", "other"]
    assert tuple(await here.chat("1", "demo")) == HELLO


class Source:
    """A membership that is told what to yield."""

    fault = ""

    def __init__(self, *lists: dict[str, MemberState]) -> None:
        self._lists = lists

    async def snapshots(self) -> AsyncGenerator[MembershipSnapshot]:
        for version, states in enumerate(self._lists):
            members = (Member(address, state, kind=MemberKind.ROUTER) for address, state in states.items())
            yield MembershipSnapshot(version + 1, tuple(members))


@pytest.mark.parametrize("states", [{"a": MemberState.ACTIVE}, {}], ids=["one", "none"])
def test_the_first_list_of_a_membership_can_be_waited_for(states: dict[str, MemberState]) -> None:
    async def test() -> None:
        here, began_s = Site(), asyncio.get_running_loop().time()
        here._models = {"a": MODEL}

        async def follow() -> None:
            await asyncio.sleep(1)
            await here.routers.follow(Source(states))

        async with asyncio.TaskGroup() as group:
            group.create_task(follow())
            await here.routers.listed()
            assert asyncio.get_running_loop().time() == began_s + 1
        assert list(here.clients) == list(states)

    virtual_time.run(test())


async def test_routers_come_and_go_with_the_membership() -> None:
    here, active, leaving = Site(), MemberState.ACTIVE, MemberState.LEAVING
    here._models = {"a": MODEL, "b": MODEL}
    await here.routers.follow(Source({"a": active}, {"a": leaving, "b": active}))
    await here.routers.ask()
    for number in range(3):
        await here.chat(str(number))
    assert here.counts == {"a": 0, "b": 3}
    here.clients["a"].goes_away()
    await here.routers.follow(Source({"b": active}))
    await here.routers.ask()
    assert (here.clients["a"].is_closed, here.clients["b"].is_closed) == (True, False)


@pytest.mark.parametrize("has_instances", [True, False], ids=["ready", "sees its first instance later"])
def test_a_request_that_a_leaving_router_refuses_goes_to_one_that_was_added_just_now(has_instances: bool) -> None:
    """As in a rolling upgrade: the new one has registered, and the old one drains at once."""

    async def test() -> None:
        here = Site(a=MODEL)
        here._models["b"] = MODEL
        async with TaskScope("asking") as scope:
            scope.spawn(here.routers.keep_asking(10.0), name="asking")
            await asyncio.sleep(0.5)
            here.clients["a"].script = [Unavailable("the router drains")]
            here.routers.use(["a", "b"], ["a"])
            if not has_instances:
                here.clients["b"].served = ()
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(here.chat("1"))
                await asyncio.sleep(0.6)
                here.clients["b"].served = (MODEL,)
            assert tuple(asked.result()) == HELLO
            assert (await here.routers.tokenize(request())).token_ids == (5, 6, 7)
        assert here.counts["b"] == 2

    virtual_time.run(test())


def test_a_refusal_waits_no_longer_than_two_seconds_for_a_router_that_names_no_model() -> None:
    async def test() -> None:
        here = Site(a=MODEL, b=MODEL)
        here.clients["a"].script = [Unavailable("no text instance")]
        here.clients["b"].goes_away()
        async with TaskScope("asking") as scope:
            scope.spawn(here.routers.keep_asking(10.0), name="asking")
            await asyncio.sleep(0.5)
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(Unavailable, match="no text instance"):
                await here.chat("1")
            assert asyncio.get_running_loop().time() - began_s == pytest.approx(2)

    virtual_time.run(test())


def test_routers_that_do_not_answer_are_asked_each_second_and_the_others_seldom() -> None:
    async def test() -> None:
        here = Site(a=MODEL, b=MODEL)
        here.clients["b"].goes_away()
        async with TaskScope("asking") as scope:
            scope.spawn(here.routers.keep_asking(10.0), name="asking")
            await asyncio.sleep(0)
            await here.routers.asked()
            await asyncio.sleep(25.5)
        assert (here.clients["a"].lookups, here.clients["b"].lookups) == (3, 26)

    virtual_time.run(test())


async def test_it_is_known_which_models_there_are_once_one_router_has_answered() -> None:
    here = Site(a=MODEL, b=MODEL)
    hangs = here.clients["b"].hangs = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(here.routers.ask())
        await here.routers.asked()
        assert here.routers.reached
        hangs.set()


async def resolved(here: Site, **asked: Any) -> list[tuple[ResolvedItem, ...]]:
    async with aclosing(here.routers.resolve(ResolveRequest("r", "demo", **asked))) as answer:
        return [items async for items in answer]


async def test_keys_are_looked_for_at_one_router_after_the_other() -> None:
    here = await site(a=MODEL, b=MODEL)
    here.clients["b"].knows_keys = True
    for _ in range(4):
        assert await resolved(here, keys=(bytes(32),)) == [()]
    assert len(here.clients["b"].resolves) == 4
    here.clients["b"].knows_keys = False
    with pytest.raises(NotFound):
        await resolved(here, keys=(bytes(32),))


@pytest.mark.slow
async def test_a_resolve_that_could_not_be_sent_goes_to_another_router() -> None:
    here = await site(a=MODEL, b=MODEL)
    here.clients["a"].goes_away()
    for _ in range(3):
        assert await resolved(here) == [()]
    assert len(here.clients["b"].resolves) == 3
    here.clients["b"].goes_away()
    with pytest.raises(Unavailable):
        await resolved(here)
