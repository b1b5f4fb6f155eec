import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any, ClassVar

import pytest

from tests.unit.services.instances import encode_request, encoder_instance, new_lease, under_virtual_time
from triptych.domain.embedding import Tensor
from triptych.domain.encoding import EncodeResult, LeaseRequest
from triptych.domain.instance import InstanceLimits, LimitsReport
from triptych.domain.media import MediaInfo, Shard
from triptych.domain.stage import Role, Stage
from triptych.errors import (
    ArenaFull,
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InstanceLost,
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
        async with encoder_instance() as instance:
            request = encode_request("cat")
            result = await instance.service.encode(request)
            ticket = result.ticket
            verify(instance.store.arena, ticket.offset, ticket)
            found = tensors(instance.store.arena, ticket.offset, ticket)
            assert bytes(found["embeddings"].data) == fake_embedding(request.media, 32, 8)
            assert (ticket.holder, ticket.epoch, ticket.tokens, result.cached) == ("encoder", 1, 32, False)
            assert result.encode_s > 0
            assert result.queue_s > 0
            assert instance.store.memory.leases == 2
            assert ticket.lease_id != result.router_lease
            await instance.service.release(leases_of(result))

    under_virtual_time(scenario)


@pytest.mark.parametrize(("prepare_cores", "described"), [(None, 2), (1, 1)])
def test_it_is_described_with_the_cores_that_prepare(prepare_cores: int | None, described: int) -> None:
    async def scenario() -> None:
        async with encoder_instance(prepare_cores=prepare_cores) as instance:
            (part,) = (await instance.service.describe()).parts
            assert part.prepare_cores == described

    under_virtual_time(scenario)


def test_a_second_call_for_the_same_bytes_is_a_cache_hit_with_its_own_leases() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance:
            first = await instance.service.encode(encode_request("cat"))
            second = await instance.service.encode(encode_request("cat"))
            assert (second.cached, instance.engine.encoded_items) == (True, 1)
            assert second.ticket.checksum == first.ticket.checksum
            assert len(set(leases_of(first, second))) == 4
            await instance.service.release(leases_of(first, second))

    under_virtual_time(scenario)


def test_size_options_and_tenant_are_part_of_the_identity() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance:
            requests = [
                encode_request("cat"),
                encode_request("cat", width=15),
                encode_request("cat", tenant_salt=b"other"),
            ]
            results = await asyncio.gather(*map(instance.service.encode, requests))
            assert len({result.ticket.key for result in results}) == 3
            assert instance.engine.encoded_items == 3
            await instance.service.release(leases_of(*results))

    under_virtual_time(scenario)


def test_equal_items_at_the_same_time_are_encoded_once() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance:
            results = await asyncio.gather(*(instance.service.encode(encode_request("cat")) for _ in range(20)))
            assert instance.engine.encoded_items == 1
            assert len(set(leases_of(*results))) == 40
            await instance.service.release(leases_of(*results))

    under_virtual_time(scenario)


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.003, 0.006, 0.0085, 0.0135])
def test_equal_callers_are_answered_when_the_first_of_them_cancels(after_s: float) -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance, asyncio.TaskGroup() as group:
            first = group.create_task(instance.service.encode(encode_request("cat")))
            others = [group.create_task(instance.service.encode(encode_request("cat"))) for _ in range(3)]
            await asyncio.sleep(after_s)
            got = [] if first.cancel() else [first.result()]
            await instance.service.release(leases_of(*got, *[await other for other in others]))
            assert instance.engine.encoded_items == 1

    under_virtual_time(scenario)


@pytest.mark.parametrize("steps", range(40))
def test_a_caller_that_cancels_at_any_moment_leaks_nothing(steps: int) -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance, asyncio.TaskGroup() as group:
            call = group.create_task(instance.service.encode(encode_request("cat")))
            await asyncio.sleep(steps * 0.0005)
            if not call.cancel():
                await instance.service.release(leases_of(call.result()))

    under_virtual_time(scenario)


def test_an_abandoned_item_in_the_queue_is_not_encoded() -> None:
    async def scenario() -> None:
        async with encoder_instance(batches=BatchLimits(max_batch_items=1)) as instance, asyncio.TaskGroup() as group:
            first = group.create_task(instance.service.encode(encode_request("first")))
            second = group.create_task(instance.service.encode(encode_request("second")))
            await asyncio.sleep(0.004)  # the first is being encoded, the second waits
            assert instance.service.load().at(Stage.ENCODE).pending == 2
            second.cancel()
            await instance.service.release(leases_of(await first))
            assert instance.engine.encoded_items == 1

    under_virtual_time(scenario)


def test_an_item_past_its_deadline_is_not_encoded() -> None:
    async def scenario() -> None:
        async with encoder_instance(batches=BatchLimits(max_batch_items=1)) as instance, asyncio.TaskGroup() as group:
            first = group.create_task(instance.service.encode(replace(encode_request("first"), priority=-1)))
            with pytest.raises(DeadlineExceeded, match="item 0"):
                await instance.service.encode(encode_request("second", timeout_s=0.005))
            await instance.service.release(leases_of(await first))
            assert instance.engine.encoded_items == 1

    under_virtual_time(scenario)


def test_a_batch_is_bounded_by_rows_where_an_item_has_one_position_in_the_prompt() -> None:
    class CrossAttention(FakeEncoderEngine):
        batches: ClassVar[list[int]] = []

        def prepare(self, *arguments: Any) -> FakePrepared:
            return replace(super().prepare(*arguments), tokens=1)

        def encode(self, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
            self.batches.append(len(batch))
            return super().encode([replace(item, tokens=32) for item in batch])

    async def scenario() -> None:
        engine = CrossAttention(tokens_of=lambda _: 32)
        async with encoder_instance(engine=engine, batches=BatchLimits(max_batch_tokens=64)) as instance:
            calls = [instance.service.encode(encode_request(f"cat {number}")) for number in range(8)]
            results = await asyncio.gather(*calls)
            assert sum(engine.batches) == 8
            assert max(engine.batches) == 2
            await instance.service.release(leases_of(*results))

    under_virtual_time(scenario)


def test_one_bad_item_does_not_fail_its_batch() -> None:
    class Picky(FakeEncoderEngine):
        def encode(self, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
            if any(item.media.startswith(b"bad") for item in batch):
                raise EngineFailure("this one cannot be encoded")
            return super().encode(batch)

    async def scenario() -> None:
        engine = Picky(tokens_of=lambda info: 2 * info.width)
        async with encoder_instance(engine=engine) as instance:
            names = ["good-1", "bad", "good-2"]
            results = await asyncio.gather(
                *(instance.service.encode(encode_request(name)) for name in names), return_exceptions=True
            )
            assert isinstance(results[0], EncodeResult)
            assert isinstance(results[1], EngineFailure)
            assert isinstance(results[2], EncodeResult)
            await instance.service.release(leases_of(results[0], results[2]))

    under_virtual_time(scenario)


def test_after_an_error_the_same_image_can_be_encoded() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance:
            instance.engine.failures.append(EngineFailure("once"))
            calls = [instance.service.encode(encode_request("cat")) for _ in range(3)]
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(failure, EngineFailure) for failure in failed)
            await instance.service.release(leases_of(await instance.service.encode(encode_request("cat"))))

    under_virtual_time(scenario)


@pytest.mark.parametrize("fails_as_batch_first", [False, True])
def test_when_the_engine_cannot_go_on_only_what_it_encoded_is_lost_with_it_and_the_process_ends(
    fails_as_batch_first: bool,
) -> None:
    lost = InstanceLost("the device has failed")

    async def scenario() -> None:
        async with encoder_instance(batches=BatchLimits(max_batch_items=3)) as instance:
            instance.engine.failures.extend([EngineFailure("one of them"), lost] if fails_as_batch_first else [lost])
            calls = [instance.service.encode(encode_request(f"cat {number}")) for number in range(8)]
            failed = await asyncio.gather(*calls, return_exceptions=True)
            lost_with_it = 1 if fails_as_batch_first else 2  # the first batch is small
            kinds = [type(error) for error in failed]
            assert kinds == [InstanceLost] * lost_with_it + [Unavailable] * (8 - lost_with_it)
            assert instance.engine.encoded_items == 0
            assert "batches" in await instance.scope.failed()
            instance.lasting_tasks -= 1
            with pytest.raises(Unavailable):
                await instance.service.encode(encode_request("dog"))
            await instance.service.drain()

    under_virtual_time(scenario)


def test_an_unexpected_engine_error_is_reported_without_details() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance:
            instance.engine.failures.append(RuntimeError("address 0x7f"))
            with pytest.raises(InternalError) as raised:
                await instance.service.encode(encode_request("cat"))
            assert "0x" not in raised.value.message

    under_virtual_time(scenario)


def test_engine_outputs_that_differ_from_their_specs_are_refused() -> None:
    class Wide(FakeEncoderEngine):
        def encode(self, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
            return super().encode([replace(item, tokens=3, outputs=fake_tensors(3, 8)) for item in batch])

    class Short(FakeEncoderEngine):
        def encode(self, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
            return super().encode(batch)[:-1]

    async def scenario() -> None:
        for kind, error in ((Wide, EngineFailure), (Short, InternalError)):
            async with encoder_instance(engine=kind(tokens_of=lambda info: info.width)) as instance:
                with pytest.raises(error):
                    await instance.service.encode(encode_request("cat"))

    under_virtual_time(scenario)


def test_a_full_arena_refuses_at_once_and_holds_no_memory() -> None:
    async def scenario() -> None:
        async with encoder_instance(slots=2) as instance:
            kept = [await instance.service.encode(encode_request(name)) for name in ("a", "b")]
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(ArenaFull):
                await instance.service.encode(encode_request("c"))
            assert asyncio.get_running_loop().time() - began_s < 0.01
            assert instance.engine.encoded_items == 2
            await instance.service.release(leases_of(kept[0]))
            third = await instance.service.encode(encode_request("c"))
            await instance.service.release(leases_of(kept[1], third))

    under_virtual_time(scenario)


def test_an_item_larger_than_the_arena_is_an_invalid_request() -> None:
    async def scenario() -> None:
        async with encoder_instance(slots=2, batches=BatchLimits(max_prepared_bytes=1000)) as instance:
            with pytest.raises(InvalidMedia, match="limit is 1000"):
                await instance.service.encode(encode_request("cat", width=64))
        async with encoder_instance(slots=1) as instance:
            with pytest.raises(InvalidMedia):
                await instance.service.encode(encode_request("cat", width=64, tokens=128))

    under_virtual_time(scenario)


ITEM_NBYTES = 40 + 4 * 16 * 8
"""The fake engine's memory for preparing an item of ``encode_request``, including the item."""


class CountingEngine(FakeEncoderEngine):
    """Counts prepared bytes; a shard counts its share of the item."""

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
    """Records its stop signals; the first item fails, as if its decoder had been killed."""

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


def test_preprocessing_stops_with_its_last_caller_and_restarts_for_a_new_one() -> None:
    async def scenario() -> None:
        engine = StoppingEngine(tokens_of=lambda info: 2 * info.width)
        async with encoder_instance(engine=engine) as instance, asyncio.TaskGroup() as group:
            first, second = (group.create_task(instance.service.encode(encode_request("cat"))) for _ in range(2))
            await asyncio.sleep(engine.prepare_s / 4)
            first.cancel()
            await asyncio.sleep(engine.prepare_s / 4)
            stops = [engine.signals[0].stopped]
            second.cancel()
            await asyncio.sleep(engine.prepare_s / 4)
            stops.append(engine.signals[0].stopped)
            assert stops == [False, True]
            result = await instance.service.encode(encode_request("cat"))
            assert len(engine.signals) == 2
            await instance.service.release(leases_of(result))

    under_virtual_time(scenario)


def test_preprocessing_stops_at_the_callers_deadline() -> None:
    async def scenario() -> None:
        engine = StoppingEngine(tokens_of=lambda info: 2 * info.width)
        async with encoder_instance(engine=engine) as instance:
            with pytest.raises(DeadlineExceeded):
                await instance.service.encode(replace(encode_request("cat"), timeout_s=engine.prepare_s / 2))
            assert engine.signals[0].stopped

    under_virtual_time(scenario)


def test_an_item_above_the_memory_limit_is_refused_before_decoding() -> None:
    async def scenario() -> None:
        engine = CountingEngine(tokens_of=lambda info: 2 * info.width)
        async with encoder_instance(engine=engine, batches=BatchLimits(max_prepared_bytes=ITEM_NBYTES - 1)) as instance:
            reason = f"the item takes {ITEM_NBYTES} bytes to prepare, the limit is {ITEM_NBYTES - 1}"
            with pytest.raises(InvalidMedia, match=reason):
                await instance.service.encode(encode_request("cat"))
            assert engine.prepared == 0
            smaller = await instance.service.encode(encode_request("cat", width=8, tokens=16))
            half = await instance.service.encode(replace(encode_request("cat", tokens=16), shard=Shard(0, 1, 2)))
            assert engine.prepared == 2
            await instance.service.release(leases_of(smaller, half))
        async with encoder_instance(batches=BatchLimits(max_prepared_bytes=ITEM_NBYTES)) as instance:
            await instance.service.release(leases_of(await instance.service.encode(encode_request("cat"))))

    under_virtual_time(scenario)


def test_items_above_the_memory_limit_together_are_overloaded() -> None:
    async def scenario() -> None:
        async with encoder_instance(batches=BatchLimits(max_prepared_bytes=2 * ITEM_NBYTES)) as instance:
            calls = (instance.service.encode(encode_request(name)) for name in ("a", "b", "c"))
            *served, refused = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(refused, Overloaded)
            assert f"waiting items take {2 * ITEM_NBYTES} of {2 * ITEM_NBYTES} bytes" in str(refused)
            again = await instance.service.encode(encode_request("c"))
            results = [result for result in served if isinstance(result, EncodeResult)]
            assert len(results) == 2
            await instance.service.release(leases_of(*results, again))

    under_virtual_time(scenario)


def test_a_burst_is_answered_or_refused_without_losses() -> None:
    async def scenario() -> None:
        async with encoder_instance(slots=300, batches=BatchLimits(max_waiting_items=150)) as instance:
            calls = (instance.service.encode(encode_request(f"image-{n}")) for n in range(200))
            results = await asyncio.gather(*calls, return_exceptions=True)
            served = [result for result in results if isinstance(result, EncodeResult)]
            refused = [result for result in results if isinstance(result, Overloaded)]
            assert len(served) + len(refused) == 200
            assert len(served) >= 150
            assert len({result.ticket.offset for result in served}) == len(served)
            await instance.service.release(leases_of(*served))

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
def test_an_invalid_request_is_refused(change: dict[str, object], error: type[TriptychError], says: str) -> None:
    async def scenario() -> None:
        async with encoder_instance(max_item_bytes=1000) as instance:
            request = replace(encode_request("cat"), **change)  # type: ignore[arg-type]
            with pytest.raises(error, match=says):
                await instance.service.encode(request)
            assert instance.engine.encoded_items == 0

    under_virtual_time(scenario)


def test_a_cached_embedding_of_another_length_is_refused() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance:
            first = await instance.service.encode(encode_request("cat"))
            with pytest.raises(InvalidRequest, match="has 32 tokens"):
                await instance.service.encode(encode_request("cat", tokens=8))
            await instance.service.release(leases_of(first))

    under_virtual_time(scenario)


def test_undecodable_media_is_invalid() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance:
            media = b"x" * 20 + BROKEN_MEDIA
            request = encode_request("x")
            info = replace(request.info, nbytes=len(media), digest=blake2b(media, digest_size=32).digest())
            with pytest.raises(InvalidMedia):
                await instance.service.encode(replace(request, media=media, info=info))

    under_virtual_time(scenario)


def test_bytes_of_running_calls_are_bounded() -> None:
    async def scenario() -> None:
        async with encoder_instance(max_item_bytes=50, max_received_bytes=100) as instance:
            calls = (instance.service.encode(encode_request(name)) for name in "abc")
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(results[2], Overloaded)
            await instance.service.release(
                leases_of(*[result for result in results if isinstance(result, EncodeResult)])
            )

    under_virtual_time(scenario)


def test_unreleased_leases_expire() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance:
            result = await instance.service.encode(encode_request("cat", lease_s=2.0))
            assert instance.store.may_read(result.ticket.lease_id, result.ticket.offset, 8)
            await asyncio.sleep(2.1)
            assert not instance.store.may_read(result.ticket.lease_id, result.ticket.offset, 8)
            assert instance.store.memory.leases == 2  # a pull that started in time may still be running
            await asyncio.sleep(2.0)
            assert instance.store.memory.leases == 0

    under_virtual_time(scenario)


def test_further_readers_get_leases_until_the_embedding_is_evicted() -> None:
    async def scenario() -> None:
        async with encoder_instance(slots=1) as instance:
            result = await instance.service.encode(encode_request("cat"))
            further = LeaseRequest(result.ticket.key, result.ticket.generation, new_lease(), 5.0, 1.0)
            ticket = await instance.service.lease(further)
            assert ticket.lease_id == further.lease_id
            assert ticket.offset == result.ticket.offset
            await instance.service.release([*leases_of(result), ticket.lease_id])
            other = await instance.service.encode(encode_request("dog"))
            with pytest.raises(LeaseLost):
                await instance.service.lease(replace(further, lease_id=new_lease()))
            await instance.service.release(leases_of(other))

    under_virtual_time(scenario)


def test_watchers_see_the_load_at_a_bounded_rate() -> None:
    async def scenario() -> None:
        async with encoder_instance(load_reports=ReportIntervals(0.02, 0.5)) as instance:
            clock = asyncio.get_running_loop().time
            times, loads = [], []
            async with asyncio.TaskGroup() as group, aclosing(instance.service.watch_load()) as watch:
                calls = [group.create_task(instance.service.encode(encode_request(f"{n}"))) for n in range(30)]
                async for load in watch:
                    times.append(clock())
                    loads.append(load)
                    if len(loads) > 3 and load.at(Stage.ENCODE).pending == 0:
                        break
            assert max(load.at(Stage.ENCODE).pending for load in loads) > 0
            assert instance.store.memory.cached == 30
            assert all(b - a >= 0.0199 for a, b in pairwise(times))
            await instance.service.release(leases_of(*[await call for call in calls]))

    under_virtual_time(scenario)


def test_a_draining_encoder_refuses_new_items_and_keeps_leases() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance, asyncio.TaskGroup() as group:
            result = await instance.service.encode(encode_request("cat"))
            drained = group.create_task(instance.service.drain())
            await asyncio.sleep(0.1)
            with pytest.raises(Unavailable):
                await instance.service.encode(encode_request("dog"))
            assert instance.service.load().draining
            assert not drained.done()
            await instance.service.release(leases_of(result))
            await drained

    under_virtual_time(scenario)


def test_an_encoder_describes_itself() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance:
            info = await instance.service.describe()
            assert (info.instance_id, info.epoch, info.role) == ("encoder", 1, Role.E)
            assert info.model == instance.engine.model
            assert [offer.backend for offer in info.offers] == ["memory"]
            assert info.encoder_version == "fake-1"

    under_virtual_time(scenario)


class Counting(FakeEncoderEngine):
    def __init__(self) -> None:
        super().__init__(tokens_of=lambda info: 2 * info.width)
        self.batches: list[int] = []

    def encode(self, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
        self.batches.append(len(batch))
        return super().encode(batch)


def test_the_items_of_a_batch_are_limited_while_it_serves() -> None:
    engine = Counting()

    async def scenario() -> None:
        async with encoder_instance(engine=engine) as instance:
            service = instance.service
            limits = service.load().limits
            assert limits == LimitsReport(InstanceLimits(max_batch_items=BatchLimits().max_batch_items))
            service.live_limits.set(InstanceLimits(max_batch_items=1), 1, True, "a test")
            assert service.load().limits == LimitsReport(InstanceLimits(max_batch_items=1), 1, by_hand=True)
            results = await asyncio.gather(*(service.encode(encode_request(f"item {number}")) for number in range(6)))
            await service.release(leases_of(*results))
            assert engine.batches == [1] * 6
            with pytest.raises(InvalidRequest, match="max_batch_items is 257, must be from 1 to 256"):
                service.live_limits.set(InstanceLimits(max_batch_items=257), 2, True, "a test")

    under_virtual_time(scenario)
