"""Requests that the gateway refuses without asking the router."""

import asyncio
import time
from random import Random

import pytest

from services.gateway import shedding
from services.gateway.shedding import Shedding
from tests.unit.services.gateway.conftest import Rest
from tests.unit.services.gateway.fakes import FakeRouter
from triptych.errors import ArenaFull, Overloaded, TriptychError
from triptych.testing import virtual_time


def refuses(one: Shedding, key: str = "k") -> Overloaded | None:
    try:
        one.check(key)
    except Overloaded as error:
        return error
    return None


def made() -> Shedding:
    return Shedding(asyncio.get_running_loop().time, Random(1))


def test_nothing_is_refused_while_the_router_refuses_quickly() -> None:
    async def scenario() -> None:
        one = made()
        assert refuses(one) is None
        one.refused("k", Overloaded("full"), took_s=0.002)
        await asyncio.sleep(2 * shedding.PROBE_S)
        assert refuses(one) is None
        assert one.count == 0

    virtual_time.run(scenario())


def test_a_slow_refusal_counts_until_what_waits_at_the_router_is_done() -> None:
    async def scenario() -> None:
        one = made()
        one.refused("k", Overloaded("full", retry_after_s=4.0), took_s=0.3)
        refusal = refuses(one)
        assert refusal is not None
        assert refusal.retry_after_s is not None
        assert 4.0 <= refusal.retry_after_s <= 6.0
        await asyncio.sleep(0.29 - shedding.BEHIND_S)
        assert refuses(one) is not None
        await asyncio.sleep(0.02)
        assert refuses(one) is None
        assert one.count == 2

    virtual_time.run(scenario())


def test_no_refusal_counts_for_longer_than_its_time_nor_for_another_key() -> None:
    async def scenario() -> None:
        one = made()
        one.refused("k", Overloaded("full"), took_s=30.0)
        assert refuses(one, "another") is None
        await asyncio.sleep(shedding.RECENT_S - 0.01)
        assert refuses(one) is not None
        await asyncio.sleep(0.02)
        assert refuses(one) is None

    virtual_time.run(scenario())


async def test_a_late_event_loop_counts_and_is_measured_only_while_the_router_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shedding, "RECENT_S", 2.0)
    one = made()
    one.refused("k", Overloaded("full"), took_s=0.0)
    time.sleep(shedding.PROBE_S + 0.2)  # noqa: ASYNC251 - the loop is to be late
    await asyncio.sleep(0.001)
    assert refuses(one) is not None
    await asyncio.sleep(2.2)
    assert refuses(one) is None
    assert not one._measures, "nothing is measured without refusals"


@pytest.mark.parametrize(
    ("error", "status"), [(Overloaded("late", retry_after_s=7.0), 429), (ArenaFull("full", retry_after_s=7.0), 400)]
)
async def test_after_a_slow_refusal_the_next_is_refused_unread(
    rest: Rest, error: TriptychError, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shedding, "RECENT_S", 5.0)
    answers = asyncio.Event()
    router = FakeRouter([answers, error])
    asyncio.get_running_loop().call_later(2.0, answers.set)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with rest(router) as client:
        first = await client.post("/v1/chat/completions", json=body)
        again = await client.post("/v1/chat/completions", content=b"{ not read")
        assert first.status_code == 429
        assert int(first.headers["retry-after"]) == 7
        assert again.status_code == status
        assert status == 400 or int(again.headers["retry-after"]) >= 7
        assert (await client.get("/health")).status_code == 200
    assert len(router.requests) == 1
