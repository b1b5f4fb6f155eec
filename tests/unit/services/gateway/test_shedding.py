"""Requests that the gateway refuses before it reads them."""

import asyncio
import heapq
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from tests.unit.services.gateway.conftest import Rest
from tests.unit.services.gateway.fakes import BusyRouter, FakeRouter
from triptych.domain.chat import ChatRequest
from triptych.domain.generation import ChatEvent
from triptych.domain.tenant import NOBODY, Tenant
from triptych.errors import ArenaFull, Overloaded, TriptychError
from triptych.services.gateway import shedding
from triptych.services.gateway.keys import new_key
from triptych.services.gateway.shedding import Shedding
from triptych.virtual import virtual_time
from triptych.workload.report import percentile

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
UNREAD = b"{ not read"
TIMEOUT_S = 4.0


class LateClock:
    """Time of the loop, and of work that keeps the loop busy without an await."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worked_s = 0.0

    def __call__(self) -> float:
        return self._loop.time() + self._worked_s

    def work(self, seconds: float) -> None:
        self._worked_s += seconds


class Served:
    """A gateway's shedding on a loop that is late as the test says."""

    def __init__(self) -> None:
        self.clock = LateClock()
        self.shedding = Shedding(self.clock, Random(1))

    def ask(self, sender: Tenant | None = NOBODY, timeout_s: float = TIMEOUT_S) -> Overloaded | None:
        """What a new request is told; one that is not refused is let in."""
        refusal = self.shedding.refusal(sender, timeout_s) if self.shedding.came() else None
        if refusal is None and sender is not None:
            self.shedding.admit(sender)
        return refusal

    async def be_late(self, delay_s: float, for_s: float) -> None:
        """Each round of the loop takes so long."""
        end_s = self.clock() + for_s
        while self.clock() < end_s:
            self.clock.work(delay_s)
            await asyncio.sleep(shedding.PROBE_S / 2)


def test_a_gateway_that_stays_late_refuses_whatever_the_router_says_until_it_has_caught_up() -> None:
    async def scenario() -> None:
        served = Served()
        assert served.ask() is None
        await served.be_late(0.3, for_s=1.0)
        served.clock.work(0.3)
        assert served.ask() is None, "a few are let in"
        refusal = served.ask()
        assert refusal is not None
        assert refusal.retry_after_s is not None
        assert 1.0 <= refusal.retry_after_s <= 60.0
        assert served.ask(timeout_s=100.0) is None, "it has the time to wait"
        await asyncio.sleep(2 * shedding.INTERVAL_S)
        assert served.ask() is None
        served.clock.work(0.3)
        assert served.ask() is None, "it is a single pause again"
        assert served.shedding.count == 1

    virtual_time.run(scenario())


def test_one_pause_refuses_nothing() -> None:
    async def scenario() -> None:
        served = Served()
        for _ in range(5):
            assert served.ask() is None
            served.clock.work(3.0)
            assert served.ask() is None
            await asyncio.sleep(2 * shedding.PROBE_S)
            assert served.ask() is None
            await asyncio.sleep(0.2)
        assert served.shedding.count == 0

    virtual_time.run(scenario())


def test_a_pause_does_not_excuse_what_comes_of_it() -> None:
    """The requests of one round are begun one after the other, each after the work of those before it."""

    async def scenario() -> None:
        served = Served()
        told = []
        for _ in range(100):
            told.append(served.ask() is None)
            served.clock.work(0.01)
        let_in = told.index(False) - 1
        assert 0.01 * let_in == pytest.approx(shedding.TARGET_S + shedding.INTERVAL_S, abs=0.03)
        assert sum(told[let_in:]) <= 4, "a few are let in"

    virtual_time.run(scenario())


@dataclass
class Outcome:
    """What became of a sender's requests."""

    let_in: int = 0
    refused_after_s: list[float] = field(default_factory=list)


async def flooded(rates: Mapping[Tenant | None, float], seconds: float) -> dict[Tenant | None, Outcome]:
    """Requests come at these rates to a gateway that needs 10 ms for one that it lets in and 0.1 ms for one that it refuses."""
    served = Served()
    outcomes = {sender: Outcome() for sender in rates}
    coming = [(1 / rate, number, sender) for number, (sender, rate) in enumerate(rates.items())]
    heapq.heapify(coming)
    while (now_s := served.clock()) < seconds:
        while coming[0][0] <= now_s:
            at_s, number, sender = coming[0]
            if served.ask(sender) is None:
                outcomes[sender].let_in += 1
                served.clock.work(0.01)
            else:
                outcomes[sender].refused_after_s.append(served.clock() - at_s)
                served.clock.work(0.0001)
            heapq.heapreplace(coming, (at_s + 1 / rates[sender], number, sender))
        await asyncio.sleep(0.001)
    return outcomes


@pytest.mark.parametrize("times", [1.3, 2, 8])
def test_several_times_the_capacity_leave_it_in_use_and_are_refused_at_once(times: float) -> None:
    seconds = 20.0
    outcome = virtual_time.run(flooded({NOBODY: 100 * times}, seconds))[NOBODY]
    assert outcome.let_in / seconds >= 75, (
        "of 100 a second that there is time for, less what it takes to refuse the others"
    )
    assert percentile(outcome.refused_after_s, 99) < 0.5


def test_where_refusing_takes_all_the_time_half_of_what_was_accepted_before_is_answered() -> None:
    async def scenario() -> float:
        served = Served()
        for _ in range(200):  # 2 s of what it can do
            await asyncio.sleep(0.01)
            assert served.ask() is None
            served.shedding.accepted("")
        began_s, let_in = served.clock(), 0
        while (now_s := served.clock()) < began_s + 60:
            if served.ask() is None:
                let_in += 1
                served.shedding.accepted("")
            served.clock.work(0.01)
            if now_s % 0.4 < 0.01:
                await asyncio.sleep(0.001)
        return let_in / 60

    assert 40 <= virtual_time.run(scenario()) <= 60


def test_who_sends_little_is_not_refused_as_another_floods() -> None:
    flood, small = Tenant("flood"), Tenant("small")
    outcomes = virtual_time.run(flooded({flood: 600, small: 10, None: 10}, 20.0))
    assert len(outcomes[flood].refused_after_s) > 9000, "of 12000"
    assert not outcomes[small].refused_after_s
    assert len(outcomes[None].refused_after_s) > 50, "of 200 that have no valid key"


def test_bodies_that_wait_for_a_thread_put_the_gateway_behind() -> None:
    async def scenario() -> None:
        served = Served()
        assert served.ask() is None
        with served.shedding.unbegun() as first, served.shedding.unbegun():
            await asyncio.sleep(1.0)
            assert [served.ask() is None for _ in range(3)] == [True, False, False], "a few are let in"
            first.begun = True
            await asyncio.sleep(0.1)
            assert served.ask() is not None, "the second waits"
        await asyncio.sleep(2 * shedding.INTERVAL_S)
        assert served.ask() is None

    virtual_time.run(scenario())


def test_nothing_is_measured_without_requests() -> None:
    async def scenario() -> None:
        served = Served()
        served.ask()
        await asyncio.sleep(shedding.RECENT_S + 3 * shedding.PROBE_S)
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(5.0)
        served.clock.work(5.0)
        assert served.shedding.delay_s == 0.0
        assert asyncio.get_running_loop().time() == began_s + 5.0

    virtual_time.run(scenario())


def test_nothing_is_refused_while_the_router_refuses_quickly() -> None:
    async def scenario() -> None:
        served = Served()
        served.shedding.refused("", Overloaded("full"), took_s=0.002)
        for _ in range(100):
            assert served.ask() is None
            await asyncio.sleep(2 * shedding.PROBE_S)

    virtual_time.run(scenario())


def test_while_the_router_refuses_a_key_that_key_is_refused_at_a_small_delay() -> None:
    async def scenario() -> None:
        served = Served()
        served.ask()
        served.shedding.refused("", Overloaded("full", retry_after_s=4.0), took_s=0.002)
        served.clock.work(shedding.PROBE_S + 2 * shedding.BEHIND_S)
        assert served.ask() is None, "it is a single pause"
        await served.be_late(2 * shedding.BEHIND_S, for_s=2 * shedding.BEHIND_FOR_S)
        refusal = served.ask()
        assert refusal is not None
        assert refusal.retry_after_s is not None
        assert 4.0 <= refusal.retry_after_s <= 6.0
        assert served.ask(Tenant("another")) is None
        await served.be_late(2 * shedding.BEHIND_S, for_s=shedding.RECENT_S)
        assert served.ask() is None

    virtual_time.run(scenario())


def test_a_router_whose_refusals_are_late_is_asked_about_twice_as_many_as_it_accepts() -> None:
    async def scenario() -> None:
        served = Served()
        let_in = 0
        for number in range(200):
            served.shedding.accepted("")
            served.shedding.refused("", Overloaded("full"), took_s=1.0)
            for _ in range(10):
                let_in += served.ask() is None and number >= 100
                await asyncio.sleep(0.002)
            assert served.ask(Tenant("another")) is None
        assert 180 <= let_in <= 220, "of 1000, as 100 are accepted"
        served.shedding.refused("", Overloaded("full"), took_s=0.001)
        assert all(served.ask() is None for _ in range(50)), "it is in time again"

    virtual_time.run(scenario())


def test_a_few_deadlines_that_pass_do_not_refuse_a_burst() -> None:
    """Deadlines may have been too short for a router that has nothing else to do."""

    async def scenario() -> None:
        served = Served()
        for _ in range(3):
            assert served.ask() is None
            served.shedding.unanswered("")
            served.shedding.refused("", Overloaded("full"), took_s=1.0)
            served.shedding.unanswered("")
            await asyncio.sleep(shedding.LATE_RECENT_S / 3)
        assert [served.ask() for _ in range(100)] == [None] * 100
        for _ in range(shedding.LATE_COUNT):
            served.shedding.unanswered("")
        assert sum(served.ask() is None for _ in range(100)) < 5
        await asyncio.sleep(shedding.LATE_RECENT_S)
        assert [served.ask() for _ in range(100)] == [None] * 100

    virtual_time.run(scenario())


@pytest.mark.slow
async def test_a_router_that_lets_deadlines_pass_is_asked_about_few(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shedding, "BEHIND_S", 60.0)  # this machine may be late
    monkeypatch.setattr(shedding, "LATE_COUNT", 1)
    monkeypatch.setattr(shedding, "LATE_RECENT_S", 60.0)
    monkeypatch.setattr(shedding, "LEAST_ASKED", 1e-3)
    router = FakeRouter([asyncio.Event()])
    async with rest(router) as client:
        told = [
            (await client.post("/v1/chat/completions", json=ASK, headers={"x-request-timeout": "0.5"})).status_code
            for _ in range(4)
        ]
    assert told == [504, 504, 429, 429]
    assert len(router.requests) == 2


class LateRouter(FakeRouter):
    """Answers so late that its refusals are."""

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        await asyncio.sleep(3 * shedding.LATE_S)
        async for events in super().chat(request):
            yield events


@pytest.mark.parametrize(
    ("error", "status"), [(Overloaded("late", retry_after_s=7.0), 429), (ArenaFull("full", retry_after_s=7.0), 400)]
)
async def test_after_a_late_refusal_the_router_is_asked_about_few(
    rest: Rest, error: TriptychError, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shedding, "BEHIND_S", 60.0)  # this machine may be late
    monkeypatch.setattr(shedding, "LATE_COUNT", 1)
    monkeypatch.setattr(shedding, "LATE_RECENT_S", 60.0)
    monkeypatch.setattr(shedding, "LEAST_ASKED", 1e-3)
    router = LateRouter([error])
    async with rest(router) as client:
        for _ in range(2):
            first = await client.post("/v1/chat/completions", json=ASK)
            assert (first.status_code, first.headers["retry-after"]) == (429, "7")
        again = await client.post("/v1/chat/completions", content=UNREAD)
        assert again.status_code == status
        assert again.headers["x-request-id"]
        assert status == 400 or int(again.headers["retry-after"]) >= 7
        assert (await client.get("/health")).status_code == 200
    assert len(router.requests) == 2


async def test_a_gateway_that_is_behind_refuses_the_key_that_floods_and_answers_others_and_probes(
    rest: Rest, tmp_path: Path
) -> None:
    made = {name: new_key(name) for name in ("flood", "small")}
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(lines for _, lines in made.values()))
    headers = {name: {"authorization": f"Bearer {key}", "x-request-timeout": "4"} for name, (key, _) in made.items()}
    router = BusyRouter(0.02)
    async with rest(router, keys=keys) as client:

        async def ask(name: str, **how: object) -> int:
            answer = await client.post("/v1/chat/completions", headers=headers[name], **how)  # type: ignore[arg-type]
            return answer.status_code

        async with asyncio.TaskGroup() as group:
            flood = [group.create_task(ask("flood", json=ASK)) for _ in range(100)]
            await asyncio.sleep(0)
            small = group.create_task(ask("small", json=ASK))
            unread = [group.create_task(ask("flood", content=UNREAD)) for _ in range(20)]
            probes = [
                group.create_task(client.get(path, headers=headers["flood"]))
                for path in ("/health", "/ready", "/metrics")
            ]
        assert {200, 429} <= {task.result() for task in flood} <= {200, 429, 504}, "late ones on a slow machine"
        assert [task.result() for task in unread].count(429) >= 15, "of 20, as a few are let in"
        assert small.result() == 200
        assert [task.result().status_code for task in probes] == [200, 200, 200]
