"""Requests that the gateway asks the router about together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from services.gateway import rounds, shedding
from services.gateway.keys import new_key
from services.gateway.rounds import MOST_OF_TIME, ROUND_S, Rounds
from tests.unit.services.gateway.conftest import Rest
from tests.unit.services.gateway.fakes import HELLO, FakeRouter
from triptych.domain.chat import ChatRequest
from triptych.domain.generation import ChatEvent
from triptych.errors import Overloaded, TriptychError, Unavailable
from triptych.testing import virtual_time

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
LONG_S = 1.2 * ROUND_S / MOST_OF_TIME
"""Enough time to wait for a round."""
SLOW_S = 1.5


async def began_s(one: Rounds, at_s: float, left_s: float = LONG_S) -> float:
    """When a request that comes at this time is asked about."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at_s - loop.time())
    await one.turn(left_s)
    return loop.time()


def test_the_first_goes_at_once_and_those_that_come_soon_after_it_together() -> None:
    async def scenario() -> None:
        one, start_s = Rounds(), asyncio.get_running_loop().time() + 1.0
        came = [0.0, 0.1 * ROUND_S, 0.5 * ROUND_S, 0.9 * ROUND_S, 1.1 * ROUND_S, 1.9 * ROUND_S, 9 * ROUND_S]
        went = await asyncio.gather(*(began_s(one, start_s + at_s) for at_s in came))
        assert [at_s - start_s for at_s in went] == pytest.approx(
            [0.0, ROUND_S, ROUND_S, ROUND_S, 2 * ROUND_S, 2 * ROUND_S, 9 * ROUND_S]
        )
        assert one.count == 5

    virtual_time.run(scenario())


def test_no_request_waits_longer_than_a_small_part_of_its_time() -> None:
    async def scenario() -> None:
        one, start_s = Rounds(), asyncio.get_running_loop().time() + 1.0
        hurried = 0.9 * ROUND_S / MOST_OF_TIME
        went = await asyncio.gather(
            began_s(one, start_s), began_s(one, start_s + 0.001), began_s(one, start_s + 0.002, hurried)
        )
        assert went == pytest.approx([start_s, start_s + ROUND_S, start_s + 0.002])

    virtual_time.run(scenario())


def test_a_client_that_leaves_holds_nobody_up() -> None:
    async def scenario() -> None:
        one = Rounds()
        await one.turn(LONG_S)
        async with asyncio.TaskGroup() as group:
            leaves, stays = (group.create_task(one.turn(LONG_S)) for _ in range(2))
            await asyncio.sleep(0.1 * ROUND_S)
            leaves.cancel()
        assert leaves.cancelled()
        assert stays.done()
        assert not one._waiting

    virtual_time.run(scenario())


class Watched(FakeRouter):
    """Notes when it was asked, and refuses what is refused by name."""

    def __init__(self, refusal: TriptychError | None) -> None:
        super().__init__(HELLO)
        self.refusal = refusal
        self.asked_s: list[float] = []

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        self.asked_s.append(asyncio.get_running_loop().time())
        if self.refusal is not None:
            raise self.refusal
        async for events in super().chat(request):
            yield events


@pytest.fixture
def slow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds so far apart that it shows on a busy machine, on which nothing is shed."""
    monkeypatch.setattr(rounds, "ROUND_S", SLOW_S)
    monkeypatch.setattr(rounds, "MOST_OF_TIME", 1.0)
    monkeypatch.setattr(shedding, "RECENT_S", 20.0)
    monkeypatch.setattr(shedding, "BEHIND_S", 60.0)


@pytest.mark.usefixtures("slow_rounds")
async def test_while_the_router_refuses_requests_are_asked_about_together_and_each_is_decided_on(rest: Rest) -> None:
    router = Watched(Overloaded("late", retry_after_s=7.0))
    one = Rounds()
    async with rest(router, rounds=one) as client:
        assert (await client.post(PATH, json=BODY)).status_code == 429  # nothing was refused before it
        assert one.count == 0
        answers = await asyncio.gather(*(client.post(PATH, json=BODY) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [429] * 4
        assert {answer.headers["retry-after"] for answer in answers} == {"7"}
        router.refusal = None
        answers = await asyncio.gather(*(client.post(PATH, json=BODY) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
    assert len(router.asked_s) == 8
    assert one.count >= 3
    _, first_s, *together_s = router.asked_s[:5]
    assert max(together_s) - min(together_s) < SLOW_S / 2 < min(together_s) - first_s


@pytest.mark.usefixtures("slow_rounds")
async def test_a_request_waits_without_rounds_for_nothing_and_so_after_another_error(rest: Rest) -> None:
    for refusal, own in ((Overloaded("late"), None), (Unavailable("no instance"), Rounds())):
        router = Watched(refusal)
        async with rest(router, rounds=own) as client:
            for _ in range(3):
                assert (await client.post(PATH, json=BODY)).status_code == refusal.http_status
        assert router.asked_s[-1] - router.asked_s[0] < SLOW_S
        assert own is None or own.count == 0


@pytest.mark.usefixtures("slow_rounds")
async def test_a_key_that_is_not_refused_does_not_wait_for_one_that_is(rest: Rest, tmp_path: Path) -> None:
    (refused, first), (other, second) = new_key("refused"), new_key("other")
    keys = tmp_path / "keys.toml"
    keys.write_text(first + second)
    router, one = Watched(Overloaded("late")), Rounds()
    async with rest(router, rounds=one, keys=keys) as client:

        async def status(key: str) -> int:
            return (await client.post(PATH, json=BODY, headers={"authorization": f"Bearer {key}"})).status_code

        assert [await status(refused), await status(refused)] == [429, 429]
        router.refusal = None
        assert await status(other) == 200
        assert one.count == 0
        assert await status(refused) == 200
        assert one.count == 1
