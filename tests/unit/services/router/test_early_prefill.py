"""The policy ``prefix``: the prefix of a prompt is computed where the request goes, while items are being encoded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from tests.unit.services.router.fakes import Bench, ask, bench, collect, image
from tests.unit.services.router.test_continuations import shape
from tests.unit.services.router.test_service import until, virtual
from triptych.domain.chat import ChatRequest
from triptych.domain.queue_position import AGEING_S
from triptych.domain.tenant import Tenant
from triptych.domain.timeline import Outcome
from triptych.errors import DeadlineExceeded, EngineFailure, Overloaded, TransferFailed, TriptychError
from triptych.policy.policies import PolicyNames
from triptych.services.router.settings import RouterSettings

SIDE_PX, TOKENS = 224, 256
"""Of an image."""
SLOW_S = 0.5


@asynccontextmanager
async def early(texts: int = 1, *, announced: bool = True, dispatch: str = "prefix") -> AsyncIterator[Bench]:
    """Two encoders, of which the second is slow. It gets the second of two images."""
    settings = RouterSettings(policies=PolicyNames(dispatch=dispatch))
    async with bench(texts=texts, settings=settings, prefills_early=announced) as made:
        made.encoders[1].encode_s = SLOW_S
        yield made


def two_images(request_id: str = "one", timeout_s: float = 60.0) -> ChatRequest:
    return ask(request_id, [image(seed, SIDE_PX) for seed in range(2)], timeout_s=timeout_s)


@virtual
async def test_the_answer_is_the_same_and_the_first_image_is_there_before_the_second() -> None:
    async with early(dispatch="complete") as made:
        expected = shape(await collect(made.router, two_images()))
        assert [request.early for request in made.texts[0].requests] == [False]
    async with early() as made:
        assert shape(await collect(made.router, two_images())) == expected
        beginning, whole = made.texts[0].requests
        assert (beginning.early, whole.early) == (True, False)
        assert whole.token_ids[: len(beginning.token_ids)] == beginning.token_ids
        assert [len(request.placements) for request in (beginning, whole)] == [1, 2]
        assert beginning.sampling.max_tokens == 1
        assert beginning.placements[0].ticket.key == whole.placements[0].ticket.key
        timeline = await made.router.timeline("one")
        assert timeline.early_tokens == len(beginning.token_ids) >= TOKENS
        assert (timeline.text_attempts, timeline.continuations) == (1, 0)


@virtual
async def test_an_instance_that_does_not_say_so_gets_whole_requests_only() -> None:
    async with early(announced=False) as made:
        await collect(made.router, two_images())
        assert [request.early for request in made.texts[0].requests] == [False]


@virtual
async def test_of_two_instances_the_one_with_the_beginning_gets_the_request() -> None:
    async with early(texts=2) as made:
        for number in range(4):
            await collect(made.router, two_images(f"r{number}"))
        for text in made.texts:
            begun = [request.request_id for request in text.requests if request.early]
            assert [request.request_id for request in text.requests if not request.early] == begun


@virtual
async def test_a_beginning_is_as_urgent_as_the_share_of_its_tenant_allows() -> None:
    async with early() as made:
        await collect(made.router, replace(two_images("other"), tenant=Tenant("other")))
        arrivals = Random(1)

        async def hog(seed: int) -> None:
            await asyncio.sleep(0.2 * arrivals.random())
            asked = ask(f"hog{seed}", [image(seed, SIDE_PX), image(-seed, SIDE_PX)], timeout_s=60.0)
            await collect(made.router, replace(asked, tenant=Tenant("hog")))

        await asyncio.gather(*map(hog, range(2, 102)))
        beginnings = [request for request in made.texts[0].requests if request.early]
        beyond = {request.request_id for request in beginnings if request.position.behind_s > AGEING_S / 2}
        assert "other" not in beyond
        assert 0 < len(beyond) < len(beginnings) - 1, "some of the hog's are within its share"


@virtual
@pytest.mark.parametrize(
    "error", [EngineFailure("failed"), Overloaded("busy"), TransferFailed("broken", items=(0,))], ids=lambda e: e.code
)
async def test_a_beginning_that_fails_is_no_failure_of_the_request(error: TriptychError) -> None:
    async with early(texts=2) as made:
        for text in made.texts:
            text.failures.append(error)
        asking = asyncio.Task(collect(made.router, two_images()))
        await until(lambda: any(text.requests for text in made.texts))
        await asyncio.sleep(0.01)
        for text in made.texts:
            text.failures.clear()
        assert shape(await asking)[1] == 4
        assert sum(request.early for text in made.texts for request in text.requests) == 1
        assert (await made.router.timeline("one")).early_tokens == 0


@virtual
@pytest.mark.parametrize("after_s", [0.005, 0.1])
async def test_an_instance_that_dies_with_a_beginning_costs_no_attempt(after_s: float) -> None:
    """While it computes it, or when it has."""
    async with early(texts=2) as made:
        asking = asyncio.Task(collect(made.router, two_images()))
        await until(lambda: any(text.requests for text in made.texts))
        await asyncio.sleep(after_s)
        first = next(text for text in made.texts if text.requests)
        first.kill()
        assert shape(await asking)[1] == 4
        assert [request.early for request in first.requests] == [True]
        timeline = await made.router.timeline("one")
        assert (timeline.outcome, timeline.text_attempts) == (Outcome.DONE, 1)
        assert timeline.text_instance != first.instance_id


@virtual
async def test_what_is_kv_transferred_to_nobody_is_given_back() -> None:
    """By a beginning, and by an answer that is over already."""
    async with early() as made:
        (text,) = made.texts
        text.transfers_kv_at_the_end = True
        await collect(made.router, two_images())
        assert [request.early for request in text.requests] == [True, False]
        await until(lambda: not text.segments)


@virtual
async def test_a_caller_that_leaves_and_a_deadline_end_the_beginning_too() -> None:
    async with early() as made:
        made.texts[0].token_s = 30.0
        asking = asyncio.Task(collect(made.router, two_images()))
        await until(lambda: made.texts[0].running == 1)
        asking.cancel()
        await until(lambda: made.texts[0].running == 0)
        with pytest.raises(DeadlineExceeded):
            await collect(made.router, two_images("late", timeout_s=SLOW_S / 2))
        assert made.texts[0].running == 0
        assert [request.early for request in made.texts[0].requests] == [True, True]


@virtual
async def test_a_beginning_in_progress_ends_when_the_request_goes() -> None:
    async with early() as made:
        made.texts[0].token_s = 1.0
        await collect(made.router, two_images())
        assert [request.early for request in made.texts[0].requests] == [True, False]
        assert (await made.router.timeline("one")).total_s < SLOW_S + 4.5


@virtual
async def test_an_embedding_that_is_lost_after_the_beginning_is_encoded_again() -> None:
    async with early() as made:
        asking = asyncio.Task(collect(made.router, two_images()))
        await until(lambda: bool(made.texts[0].requests))
        made.encoders[0].forgets = True  # the item's lease cannot be renewed
        await asyncio.sleep(0.1)
        made.encoders[0].forgets = False
        assert shape(await asking)[1] == 4
