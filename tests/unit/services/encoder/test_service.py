"""The encoder as its callers see it."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise

import pytest

from tests.unit.services.panels import encode_request, encoder_panel, new_lease, under_virtual_time
from triptych.domain.embedding import Tensor
from triptych.domain.encoding import EncodeResult, LeaseRequest
from triptych.domain.media import MediaInfo, Shard
from triptych.domain.stage import Role, Stage
from triptych.errors import (
    ArenaFull,
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InternalError,
    InvalidMedia,
    InvalidRequest,
    LeaseLost,
    ModelNotFound,
    Overloaded,
    RequestTooLarge,
    TriptychError,
    Unavailable,
)
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.ports import StopSignal
from triptych.runtime.watched_value import ReportIntervals
from triptych.testing.fakes import BROKEN_MEDIA, FakeEncoderEngine, FakePrepared, fake_embedding, fake_tensors
from triptych.transport.slot import tensors, verify


def leases_of(*results: EncodeResult) -> list[bytes]:
    return [lease for result in results for lease in (result.ticket.lease_id, result.router_lease)]


def test_an_item_becomes_an_embedding_with_two_leases() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel:
            request = encode_request("cat")
            result = await panel.service.encode(request)
            ticket = result.ticket
            verify(panel.store.arena, ticket.offset, ticket)
            found = tensors(panel.store.arena, ticket.offset, ticket)
            assert bytes(found["embeddings"].data) == fake_embedding(request.media, 32, 8)
            assert (ticket.holder, ticket.epoch, ticket.tokens, result.cached) == ("encoder", 1, 32, False)
            assert result.encode_s > 0
            assert result.queue_s > 0
            assert panel.store.memory.leases == 2
            assert ticket.lease_id != result.router_lease
            await panel.service.release(leases_of(result))

    under_virtual_time(scenario)


def test_a_second_call_for_the_same_bytes_is_served_from_the_cache_with_leases_of_its_own() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel:
            first = await panel.service.encode(encode_request("cat"))
            second = await panel.service.encode(encode_request("cat"))
            assert (second.cached, panel.engine.encoded_items) == (True, 1)
            assert second.ticket.checksum == first.ticket.checksum
            assert len(set(leases_of(first, second))) == 4
            await panel.service.release(leases_of(first, second))

    under_virtual_time(scenario)


def test_size_options_and_tenant_are_part_of_the_identity() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel:
            requests = [
                encode_request("cat"),
                encode_request("cat", width=15),
                encode_request("cat", tenant_salt=b"other"),
            ]
            results = await asyncio.gather(*map(panel.service.encode, requests))
            assert len({result.ticket.key for result in results}) == 3
            assert panel.engine.encoded_items == 3
            await panel.service.release(leases_of(*results))

    under_virtual_time(scenario)


def test_equal_items_at_the_same_time_are_encoded_once() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel:
            results = await asyncio.gather(*(panel.service.encode(encode_request("cat")) for _ in range(20)))
            assert panel.engine.encoded_items == 1
            assert len(set(leases_of(*results))) == 40
            await panel.service.release(leases_of(*results))

    under_virtual_time(scenario)


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.003, 0.006, 0.0085, 0.0135])
def test_the_others_get_theirs_when_the_first_of_equal_callers_goes_away(after_s: float) -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel, asyncio.TaskGroup() as group:
            first = group.create_task(panel.service.encode(encode_request("cat")))
            others = [group.create_task(panel.service.encode(encode_request("cat"))) for _ in range(3)]
            await asyncio.sleep(after_s)
            got = [] if first.cancel() else [first.result()]
            await panel.service.release(leases_of(*got, *[await other for other in others]))
            assert panel.engine.encoded_items == 1

    under_virtual_time(scenario)


@pytest.mark.parametrize("steps", range(40))
def test_a_caller_that_goes_away_at_any_moment_leaves_nothing_behind(steps: int) -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel, asyncio.TaskGroup() as group:
            call = group.create_task(panel.service.encode(encode_request("cat")))
            await asyncio.sleep(steps * 0.0005)
            if not call.cancel():
                await panel.service.release(leases_of(call.result()))

    under_virtual_time(scenario)


def test_an_item_that_everybody_left_while_it_waited_is_not_encoded() -> None:
    async def scenario() -> None:
        async with encoder_panel(batches=BatchLimits(max_batch_items=1)) as panel, asyncio.TaskGroup() as group:
            first = group.create_task(panel.service.encode(encode_request("first")))
            second = group.create_task(panel.service.encode(encode_request("second")))
            await asyncio.sleep(0.004)  # the first is in the tower, the second waits for it
            assert panel.service.load().at(Stage.ENCODE).pending == 2
            second.cancel()
            await panel.service.release(leases_of(await first))
            assert panel.engine.encoded_items == 1

    under_virtual_time(scenario)


def test_an_item_whose_time_is_over_is_not_encoded() -> None:
    async def scenario() -> None:
        async with encoder_panel(batches=BatchLimits(max_batch_items=1)) as panel, asyncio.TaskGroup() as group:
            first = group.create_task(panel.service.encode(replace(encode_request("first"), priority=-1)))
            with pytest.raises(DeadlineExceeded, match="item 0"):
                await panel.service.encode(encode_request("second", timeout_s=0.005))
            await panel.service.release(leases_of(await first))
            assert panel.engine.encoded_items == 1

    under_virtual_time(scenario)


def test_one_bad_item_does_not_fail_its_batch() -> None:
    class Picky(FakeEncoderEngine):
        def encode(self, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
            if any(item.media.startswith(b"bad") for item in batch):
                raise EngineFailure("this one cannot be encoded")
            return super().encode(batch)

    async def scenario() -> None:
        engine = Picky(tokens_of=lambda info: 2 * info.width)
        async with encoder_panel(engine=engine) as panel:
            names = ["good-1", "bad", "good-2"]
            results = await asyncio.gather(
                *(panel.service.encode(encode_request(name)) for name in names), return_exceptions=True
            )
            assert isinstance(results[0], EncodeResult)
            assert isinstance(results[1], EngineFailure)
            assert isinstance(results[2], EncodeResult)
            await panel.service.release(leases_of(results[0], results[2]))

    under_virtual_time(scenario)


def test_after_an_error_the_same_image_can_be_encoded() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel:
            panel.engine.failures.append(EngineFailure("once"))
            calls = [panel.service.encode(encode_request("cat")) for _ in range(3)]
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(one, EngineFailure) for one in failed)
            await panel.service.release(leases_of(await panel.service.encode(encode_request("cat"))))

    under_virtual_time(scenario)


def test_a_defect_of_the_engine_is_told_without_its_details() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel:
            panel.engine.failures.append(RuntimeError("address 0x7f"))
            with pytest.raises(InternalError) as raised:
                await panel.service.encode(encode_request("cat"))
            assert "0x" not in raised.value.message

    under_virtual_time(scenario)


def test_tensors_other_than_announced_are_refused() -> None:
    class Wide(FakeEncoderEngine):
        def encode(self, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
            return super().encode([replace(item, tokens=3, outputs=fake_tensors(3, 8)) for item in batch])

    class Short(FakeEncoderEngine):
        def encode(self, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
            return super().encode(batch)[:-1]

    async def scenario() -> None:
        for kind, error in ((Wide, EngineFailure), (Short, InternalError)):
            async with encoder_panel(engine=kind(tokens_of=lambda info: info.width)) as panel:
                with pytest.raises(error):
                    await panel.service.encode(encode_request("cat"))

    under_virtual_time(scenario)


def test_a_full_arena_refuses_at_once_and_holds_nothing() -> None:
    async def scenario() -> None:
        async with encoder_panel(slots=2) as panel:
            kept = [await panel.service.encode(encode_request(name)) for name in ("a", "b")]
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(ArenaFull):
                await panel.service.encode(encode_request("c"))
            assert asyncio.get_running_loop().time() - began_s < 0.01
            assert panel.engine.encoded_items == 2
            await panel.service.release(leases_of(kept[0]))
            third = await panel.service.encode(encode_request("c"))
            await panel.service.release(leases_of(kept[1], third))

    under_virtual_time(scenario)


def test_what_can_never_fit_is_the_requests_fault() -> None:
    async def scenario() -> None:
        async with encoder_panel(slots=2, batches=BatchLimits(max_prepared_bytes=1000)) as panel:
            with pytest.raises(InvalidMedia, match="limit is 1000"):
                await panel.service.encode(encode_request("cat", width=64))
        async with encoder_panel(slots=1) as panel:
            with pytest.raises(InvalidMedia):
                await panel.service.encode(encode_request("cat", width=64, tokens=128))

    under_virtual_time(scenario)


ITEM_NBYTES = 40 + 4 * 16 * 8
"""The fake engine's memory for preparing an item of ``encode_request``, including the item."""


class CountingEngine(FakeEncoderEngine):
    """Counts prepared bytes; a shard takes its share of the whole."""

    prepared = 0

    def decoded_nbytes(self, info: MediaInfo, shard: Shard | None = None) -> int:
        whole = super().decoded_nbytes(info)
        return whole if shard is None else whole * shard.count // shard.of

    def prepare(
        self, media: bytes, info: MediaInfo, shard: Shard | None = None, stop: StopSignal | None = None
    ) -> FakePrepared:
        self.prepared += 1
        return super().prepare(media, info, shard, stop)


class StoppingEngine(FakeEncoderEngine):
    """Records its stop signals; the first item fails, as when its decoder is killed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.signals: list[StopSignal] = []

    def prepare(
        self, media: bytes, info: MediaInfo, shard: Shard | None = None, stop: StopSignal | None = None
    ) -> FakePrepared:
        assert stop is not None
        self.signals.append(stop)
        prepared = super().prepare(media, info, shard, stop)
        if len(self.signals) == 1:
            raise Cancelled("nobody waits for the item any more")
        return prepared


def test_preparing_is_stopped_when_the_last_caller_leaves_and_begins_anew_for_one_who_comes() -> None:
    async def scenario() -> None:
        engine = StoppingEngine(tokens_of=lambda info: 2 * info.width)
        async with encoder_panel(engine=engine) as panel, asyncio.TaskGroup() as group:
            first, second = (group.create_task(panel.service.encode(encode_request("cat"))) for _ in range(2))
            await asyncio.sleep(engine.prepare_s / 4)
            first.cancel()
            await asyncio.sleep(engine.prepare_s / 4)
            stops = [engine.signals[0].stopped]
            second.cancel()
            await asyncio.sleep(engine.prepare_s / 4)
            stops.append(engine.signals[0].stopped)
            assert stops == [False, True]
            result = await panel.service.encode(encode_request("cat"))
            assert len(engine.signals) == 2
            await panel.service.release(leases_of(result))

    under_virtual_time(scenario)


def test_preparing_is_stopped_at_the_callers_deadline() -> None:
    async def scenario() -> None:
        engine = StoppingEngine(tokens_of=lambda info: 2 * info.width)
        async with encoder_panel(engine=engine) as panel:
            with pytest.raises(DeadlineExceeded):
                await panel.service.encode(replace(encode_request("cat"), timeout_s=engine.prepare_s / 2))
            assert engine.signals[0].stopped

    under_virtual_time(scenario)


def test_an_item_that_takes_more_memory_than_is_allowed_is_refused_before_it_is_decoded() -> None:
    async def scenario() -> None:
        engine = CountingEngine(tokens_of=lambda info: 2 * info.width)
        async with encoder_panel(engine=engine, batches=BatchLimits(max_prepared_bytes=ITEM_NBYTES - 1)) as panel:
            reason = f"the item takes {ITEM_NBYTES} bytes to prepare, the limit is {ITEM_NBYTES - 1}"
            with pytest.raises(InvalidMedia, match=reason):
                await panel.service.encode(encode_request("cat"))
            assert engine.prepared == 0
            smaller = await panel.service.encode(encode_request("cat", width=8, tokens=16))
            half = await panel.service.encode(replace(encode_request("cat", tokens=16), shard=Shard(0, 1, 2)))
            assert engine.prepared == 2
            await panel.service.release(leases_of(smaller, half))
        async with encoder_panel(batches=BatchLimits(max_prepared_bytes=ITEM_NBYTES)) as panel:
            await panel.service.release(leases_of(await panel.service.encode(encode_request("cat"))))

    under_virtual_time(scenario)


def test_items_that_take_too_much_memory_together_come_again_later() -> None:
    async def scenario() -> None:
        async with encoder_panel(batches=BatchLimits(max_prepared_bytes=2 * ITEM_NBYTES)) as panel:
            calls = (panel.service.encode(encode_request(name)) for name in ("a", "b", "c"))
            *served, refused = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(refused, Overloaded)
            assert f"waiting items take {2 * ITEM_NBYTES} of {2 * ITEM_NBYTES} bytes" in str(refused)
            again = await panel.service.encode(encode_request("c"))
            results = [one for one in served if isinstance(one, EncodeResult)]
            assert len(results) == 2
            await panel.service.release(leases_of(*results, again))

    under_virtual_time(scenario)


def test_a_burst_is_answered_or_refused_and_nothing_is_lost() -> None:
    async def scenario() -> None:
        async with encoder_panel(slots=300, batches=BatchLimits(max_waiting_items=150)) as panel:
            calls = (panel.service.encode(encode_request(f"image-{n}")) for n in range(200))
            results = await asyncio.gather(*calls, return_exceptions=True)
            served = [one for one in results if isinstance(one, EncodeResult)]
            refused = [one for one in results if isinstance(one, Overloaded)]
            assert len(served) + len(refused) == 200
            assert len(served) >= 150
            assert len({result.ticket.offset for result in served}) == len(served)
            await panel.service.release(leases_of(*served))

    under_virtual_time(scenario)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "other"}, ModelNotFound, "'other'"),
        ({"media": b"short"}, InvalidRequest, "5 bytes, 40 were announced"),
        ({"media": b"x" * 40}, InvalidRequest, "digest"),
        ({"tokens": 31}, InvalidRequest, "has 32 tokens, the request says 31"),
        ({"lease_s": 0.0}, InvalidRequest, "0 s"),
        ({"media": b"x" * 2000}, RequestTooLarge, "2000 bytes, the limit is 1000"),
    ],
)
def test_a_request_that_is_wrong_is_refused(change: dict[str, object], error: type[TriptychError], says: str) -> None:
    async def scenario() -> None:
        async with encoder_panel(max_item_bytes=1000) as panel:
            request = replace(encode_request("cat"), **change)  # type: ignore[arg-type]
            with pytest.raises(error, match=says):
                await panel.service.encode(request)
            assert panel.engine.encoded_items == 0

    under_virtual_time(scenario)


def test_fewer_tokens_than_a_cached_embedding_has_are_refused_too() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel:
            first = await panel.service.encode(encode_request("cat"))
            with pytest.raises(InvalidRequest, match="has 32 tokens"):
                await panel.service.encode(encode_request("cat", tokens=8))
            await panel.service.release(leases_of(first))

    under_virtual_time(scenario)


def test_media_that_cannot_be_decoded_is_invalid() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel:
            media = b"x" * 20 + BROKEN_MEDIA
            request = encode_request("x")
            info = replace(request.info, nbytes=len(media), digest=blake2b(media, digest_size=32).digest())
            with pytest.raises(InvalidMedia):
                await panel.service.encode(replace(request, media=media, info=info))

    under_virtual_time(scenario)


def test_bytes_of_calls_in_progress_are_bounded() -> None:
    async def scenario() -> None:
        async with encoder_panel(max_item_bytes=50, max_received_bytes=100) as panel:
            calls = (panel.service.encode(encode_request(name)) for name in "abc")
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(results[2], Overloaded)
            await panel.service.release(leases_of(*[one for one in results if isinstance(one, EncodeResult)]))

    under_virtual_time(scenario)


def test_leases_that_are_never_given_back_end() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel:
            result = await panel.service.encode(encode_request("cat", lease_s=2.0))
            assert panel.store.may_read(result.ticket.lease_id, result.ticket.offset, 8)
            await asyncio.sleep(2.1)
            assert not panel.store.may_read(result.ticket.lease_id, result.ticket.offset, 8)
            assert panel.store.memory.leases == 2  # a read that began in time may still be running
            await asyncio.sleep(2.0)
            assert panel.store.memory.leases == 0

    under_virtual_time(scenario)


def test_a_further_reader_gets_a_lease_until_the_embedding_is_gone() -> None:
    async def scenario() -> None:
        async with encoder_panel(slots=1) as panel:
            result = await panel.service.encode(encode_request("cat"))
            further = LeaseRequest(result.ticket.key, result.ticket.generation, new_lease(), 5.0, 1.0)
            ticket = await panel.service.lease(further)
            assert ticket.lease_id == further.lease_id
            assert ticket.offset == result.ticket.offset
            await panel.service.release([*leases_of(result), ticket.lease_id])
            other = await panel.service.encode(encode_request("dog"))
            with pytest.raises(LeaseLost):
                await panel.service.lease(replace(further, lease_id=new_lease()))
            await panel.service.release(leases_of(other))

    under_virtual_time(scenario)


def test_watchers_see_the_load_at_a_bounded_rate() -> None:
    async def scenario() -> None:
        async with encoder_panel(load_reports=ReportIntervals(0.02, 0.5)) as panel:
            clock = asyncio.get_running_loop().time
            times, loads = [], []
            async with asyncio.TaskGroup() as group, aclosing(panel.service.watch_load()) as watch:
                calls = [group.create_task(panel.service.encode(encode_request(f"{n}"))) for n in range(30)]
                async for load in watch:
                    times.append(clock())
                    loads.append(load)
                    if len(loads) > 3 and load.at(Stage.ENCODE).pending == 0:
                        break
            assert max(load.at(Stage.ENCODE).pending for load in loads) > 0
            assert panel.store.memory.cached == 30
            assert all(b - a >= 0.0199 for a, b in pairwise(times))
            await panel.service.release(leases_of(*[await call for call in calls]))

    under_virtual_time(scenario)


def test_while_draining_nothing_new_is_taken_and_promises_are_kept() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel, asyncio.TaskGroup() as group:
            result = await panel.service.encode(encode_request("cat"))
            drained = group.create_task(panel.service.drain())
            await asyncio.sleep(0.1)
            with pytest.raises(Unavailable):
                await panel.service.encode(encode_request("dog"))
            assert panel.service.load().draining
            assert not drained.done()
            await panel.service.release(leases_of(result))
            await drained

    under_virtual_time(scenario)


def test_an_encoder_says_who_it_is() -> None:
    async def scenario() -> None:
        async with encoder_panel() as panel:
            info = await panel.service.describe()
            assert (info.instance_id, info.epoch, info.role) == ("encoder", 1, Role.E)
            assert info.model == panel.engine.model
            assert [offer.backend for offer in info.offers] == ["memory"]
            assert info.encoder_version == "fake-1"

    under_virtual_time(scenario)
