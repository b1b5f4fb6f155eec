"""Resolving at the router, over fake encoders under virtual time. ``bench`` checks after each test that nothing is held."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from tests.unit.services.router.fakes import Bench, ask, bench, collect, image
from tests.unit.services.router.test_service import digest, until, virtual
from triptych.domain.chat import MediaPart
from triptych.domain.media import Modality
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.timeline import Outcome
from triptych.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidMedia,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    Unavailable,
)
from triptych.policy.admission import RequestBounds, ServerBounds
from triptych.services.router.service import RouterService
from triptych.services.router.settings import RouterSettings
from triptych.testing.fakes import FAKE_MODEL

MODEL = FAKE_MODEL.model_id
SLOT_NBYTES = 192
"""What an image's embedding takes in an arena."""


def of_media(images: Sequence[bytes], request_id: str = "r", *, timeout_s: float = 60.0) -> ResolveRequest:
    media = tuple(MediaPart(Modality.IMAGE, data) for data in images)
    return ResolveRequest(request_id, MODEL, media, timeout_s=timeout_s)


def of_keys(*keys: bytes, timeout_s: float = 10.0) -> ResolveRequest:
    return ResolveRequest("k", MODEL, keys=keys, timeout_s=timeout_s)


@asynccontextmanager
async def held(router: RouterService, request: ResolveRequest) -> AsyncIterator[tuple[ResolvedItem, ...]]:
    """The items, within a context in which they are held."""
    answer: AsyncGenerator[tuple[ResolvedItem, ...]] = router.resolve(request)
    try:
        yield await anext(answer)
    finally:
        await answer.aclose()


def leases(made: Bench) -> int:
    return sum(len(encoder.leases) for encoder in made.encoders)


@virtual
async def test_images_are_encoded_and_held_until_the_caller_leaves() -> None:
    async with bench() as made:
        images = [image(seed) for seed in range(4)]
        async with held(made.router, of_media(images)) as items:
            assert [item.ticket.key for item in items] == [digest(data) for data in images]
            assert [item.uuid for item in items] == [digest(data).hex() for data in images]
            assert {item.ticket.address for item in items} == {"encoder-0", "encoder-1"}
            assert [item.ticket.tokens for item in items] == [4] * 4
            await asyncio.sleep(30)
            assert leases(made) == 8
            assert (await made.router.timeline("r")).outcome is Outcome.RUNNING
        await until(lambda: leases(made) == 0)
        assert made.router.running == 0
        timeline = await made.router.timeline("r")
        assert (timeline.outcome, len(timeline.items), timeline.text_instance) == (Outcome.DONE, 4, "")
        assert not made.texts[0].requests


@virtual
async def test_resolving_needs_no_text_instance() -> None:
    async with bench(texts=0) as made:
        await asyncio.sleep(5)
        async with held(made.router, of_media([image(1)])) as items:
            assert len(items) == 1


@virtual
async def test_a_repeated_image_is_found_where_it_was_encoded() -> None:
    async with bench() as made:
        async with held(made.router, of_media([image(1)])) as first:
            pass
        async with held(made.router, of_media([image(1)], "r2")) as second:
            assert first[0].ticket.address == second[0].ticket.address
            assert first[0].uuid == second[0].uuid


@virtual
async def test_what_is_held_ends_with_the_deadline() -> None:
    async with bench() as made:
        answer = made.router.resolve(of_media([image(1)], timeout_s=5.0))
        assert len(await anext(answer)) == 1
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(StopAsyncIteration):
            await anext(answer)
        assert asyncio.get_running_loop().time() - started_s == pytest.approx(5.0, abs=0.1)
        await until(lambda: leases(made) == 0)


@virtual
async def test_an_image_that_is_not_encoded_in_time_is_an_error() -> None:
    async with bench() as made:
        for encoder in made.encoders:
            encoder.encode_s = 30.0
        with pytest.raises(DeadlineExceeded):
            await anext(made.router.resolve(of_media([image(1)], timeout_s=1.0)))


@virtual
async def test_a_caller_that_leaves_before_its_images_are_encoded_leaves_nothing() -> None:
    async with bench() as made:
        task = asyncio.get_running_loop().create_task(anext(made.router.resolve(of_media([image(1)]))))
        await asyncio.sleep(0.005)
        assert made.router.running == 1
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: made.router.running == 0)
        assert (await made.router.timeline("r")).outcome is Outcome.CANCELLED


@virtual
async def test_an_encoder_that_dies_is_replaced() -> None:
    async with bench() as made:
        made.encoders[0].kill()
        async with held(made.router, of_media([image(1), image(2)])) as items:
            assert {item.ticket.holder for item in items} == {"encoder-1"}


@virtual
async def test_an_engine_that_fails_everywhere_fails_the_request() -> None:
    async with bench() as made:
        for encoder in made.encoders:
            encoder.failures.extend([EngineFailure("it cannot")] * 3)
        with pytest.raises(EngineFailure):
            await anext(made.router.resolve(of_media([image(1)])))


@virtual
async def test_a_key_is_leased_anew_where_its_embedding_is() -> None:
    async with bench() as made, held(made.router, of_media([image(1), image(2)])) as items:
        keys = [item.ticket.key for item in items]
        async with held(made.router, of_keys(*reversed(keys))) as found:
            assert [item.ticket.key for item in found] == keys[::-1]
            assert [item.ticket.address for item in found] == [item.ticket.address for item in items][::-1]
            assert not {item.ticket.lease_id for item in found} & {item.ticket.lease_id for item in items}
            assert all(item.cached for item in found)
            assert leases(made) == 6
        await until(lambda: leases(made) == 4)


@virtual
async def test_a_key_that_is_asked_for_twice_has_two_leases() -> None:
    async with bench() as made, held(made.router, of_media([image(1)])) as items:
        async with held(made.router, of_keys(*[items[0].ticket.key] * 64)) as found:
            assert len({item.ticket.lease_id for item in found}) == 64
            assert leases(made) == 66
        await until(lambda: leases(made) == 2)


@pytest.mark.parametrize("turns", range(0, 40, 2))
@virtual
async def test_a_caller_that_leaves_at_any_moment_leaves_nothing(turns: int) -> None:
    """After this many turns of the event loop, some of them within the calls to encoders."""
    loop = asyncio.get_running_loop()

    async def leave(request: ResolveRequest) -> None:
        task = loop.create_task(anext(made.router.resolve(request)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    async with bench() as made:
        await leave(of_media([image(1), image(2)]))
        await until(lambda: leases(made) == made.router.running == 0)
        async with held(made.router, of_media([image(3), image(4)], "r2")) as items:
            await leave(of_keys(*(item.ticket.key for item in items)))
            await until(lambda: leases(made) == 4)


@virtual
async def test_leases_of_keys_end_with_the_time_limit() -> None:
    async with bench() as made, held(made.router, of_media([image(1)])) as items:
        answer = made.router.resolve(of_keys(items[0].ticket.key, timeout_s=3.0))
        (found,) = await anext(answer)
        assert found.ticket.lease_s == 3.0
        with pytest.raises(StopAsyncIteration):
            await anext(answer)
        await until(lambda: leases(made) == 2)


@virtual
async def test_a_key_that_nobody_resolved_or_whose_embedding_is_gone_is_not_found() -> None:
    async with bench() as made:
        with pytest.raises(NotFound, match=r"keys\[0\]: no embedding of this key is held") as caught:
            await anext(made.router.resolve(of_keys(bytes(32))))
        assert caught.value.param == "keys[0]"
        async with held(made.router, of_media([image(1), image(2)])) as items:
            first, second = (item.ticket.key for item in items)
        await until(lambda: leases(made) == 0)
        with pytest.raises(NotFound, match=r"keys\[1\]"):
            async with held(made.router, of_media([image(1)], "r2")):
                await anext(made.router.resolve(of_keys(first, second)))


@virtual
async def test_a_key_at_an_encoder_that_has_died_is_unavailable() -> None:
    async with bench() as made, held(made.router, of_media([image(1)])) as items:
        next(encoder for encoder in made.encoders if encoder.leases).kill()
        with pytest.raises(Unavailable):
            await anext(made.router.resolve(of_keys(items[0].ticket.key)))


@virtual
async def test_only_the_last_keys_are_remembered() -> None:
    async with (
        bench(settings=RouterSettings(resolved_keys=2)) as made,
        held(made.router, of_media([image(seed) for seed in range(3)])) as items,
    ):
        async with held(made.router, of_keys(*(item.ticket.key for item in items[1:]))) as found:
            assert len(found) == 2
        with pytest.raises(NotFound):
            await anext(made.router.resolve(of_keys(items[0].ticket.key)))


@virtual
async def test_what_cannot_be_admitted_is_refused() -> None:
    settings = RouterSettings(
        request_size=RequestBounds(max_items_per_request=2), capacity=ServerBounds(max_concurrent_requests=1)
    )
    async with bench(settings=settings) as made:
        for request, error in (
            (of_media([]), InvalidRequest),
            (of_media([image(seed) for seed in range(3)]), InvalidRequest),
            (of_keys(*(bytes([number]) * 32 for number in range(3))), InvalidRequest),
            (replace(of_media([image(1)]), keys=(bytes(32),)), InvalidRequest),
            (replace(of_media([image(1)]), model="other"), ModelNotFound),
            (replace(of_keys(bytes(32)), model="other"), ModelNotFound),
            (replace(of_media([image(1)]), timeout_s=0.0), DeadlineExceeded),
            (replace(of_media([image(1)]), priority=2**40), InvalidRequest),
            (replace(of_media([image(1)]), request_id=""), InvalidRequest),
        ):
            with pytest.raises(error):
                await anext(made.router.resolve(request))
        with pytest.raises(InvalidMedia) as caught:
            await anext(made.router.resolve(of_media([image(1), b"none"])))
        assert caught.value.param == "media[1]"
        await until(lambda: made.router.running == 0)
        async with held(made.router, of_media([image(1)])) as items:
            for request in (of_media([image(2)], "r2"), of_keys(items[0].ticket.key)):
                with pytest.raises(Overloaded):
                    await anext(made.router.resolve(request))


@virtual
async def test_a_draining_router_still_finds_keys_and_waits_for_what_is_held() -> None:
    async with bench() as made:
        async with held(made.router, of_media([image(1)])) as items:
            draining = asyncio.get_running_loop().create_task(made.router.drain())
            await asyncio.sleep(0.1)
            assert not draining.done()
            with pytest.raises(Unavailable):
                await anext(made.router.resolve(of_media([image(2)], "r2")))
            reading = held(made.router, of_keys(items[0].ticket.key))
            assert len(await reading.__aenter__()) == 1
        await asyncio.sleep(1.0)
        assert not draining.done()
        assert leases(made) == 1
        await reading.__aexit__(None, None, None)
        await draining
        assert leases(made) == 0, "it does not end before they are released"


@virtual
async def test_chats_go_on_beside_it_and_their_figures_do_not_count_it() -> None:
    async with bench() as made:
        async with held(made.router, of_media([image(1)])):
            await collect(made.router, ask("c", [image(1)]))
        assert (await made.router.timeline("c")).outcome is Outcome.DONE


@virtual
async def test_open_calls_hold_at_most_their_share_and_chats_have_the_rest() -> None:
    """Three embeddings fit the share, six the arena."""
    settings = RouterSettings(resolved_share=0.5)
    async with bench(1, arena_bytes=6 * SLOT_NBYTES, settings=settings) as made:
        async with AsyncExitStack() as calls:
            for number in range(3):
                await calls.enter_async_context(held(made.router, of_media([image(number)], f"r{number}")))
            with pytest.raises(Overloaded, match=r"hold \d+ of \d+ bytes of embeddings") as caught:
                await anext(made.router.resolve(of_media([image(3)], "r3")))
            assert caught.value.retry_after_s
            async with held(made.router, of_media([image(0), image(2), image(2)], "again")) as items:
                assert len(items) == 3, "what is held already takes nothing more"
            assert await collect(made.router, ask("chat", [image(number) for number in range(10, 13)]))
        await until(lambda: made.router.running == 0)
        async with held(made.router, of_media([image(3)], "later")) as items:
            assert len(items) == 1


@virtual
async def test_keys_that_are_read_count_as_well() -> None:
    async with bench(1, arena_bytes=6 * SLOT_NBYTES, settings=RouterSettings(resolved_share=0.5)) as made:
        async with AsyncExitStack() as readers:
            async with AsyncExitStack() as calls:
                for number in range(3):
                    items = await calls.enter_async_context(held(made.router, of_media([image(number)], f"r{number}")))
                    for _ in range(2):
                        await readers.enter_async_context(held(made.router, of_keys(items[0].ticket.key)))
            await until(lambda: made.router.running == 0)
            with pytest.raises(Overloaded):
                await anext(made.router.resolve(of_media([image(3)])))
        await until(lambda: made.router.running == 0)
        async with held(made.router, of_media([image(3)])) as items:
            assert len(items) == 1


@virtual
async def test_a_call_that_can_never_have_its_share_is_refused_for_good() -> None:
    async with bench(1, arena_bytes=6 * SLOT_NBYTES, settings=RouterSettings(resolved_share=0.5)) as made:
        with pytest.raises(InvalidRequest, match="may hold") as caught:
            await anext(made.router.resolve(of_media([image(number) for number in range(4)])))
        assert caught.value.param == "media"
