"""Room for keys and values: in turn, all or nothing; and at once, what there is, where embeddings lie in the arena too."""

import asyncio
import random
from collections.abc import Awaitable

from tests.unit.services.instances import under_virtual_time
from triptych.domain.kv_segment import KvSegment
from triptych.domain.queue_position import QueuePosition
from triptych.machine.arena.leases import LeaseLimits
from triptych.machine.arena.published import PublishedContents
from triptych.machine.arena.slots import Slot
from triptych.runtime.metrics import Metrics
from triptych.services.text.kv_store import KvStore
from triptych.services.text.record import TextRecord
from triptych.testing.fake_kv import fake_kv_kind
from triptych.testing.fakes import FAKE_MODEL
from triptych.transport.arena import HEADER_NBYTES, HostArena
from triptych.transport.arena_store import ArenaStore
from triptych.virtual.offload import InlineOffload

KIND = fake_kv_kind(FAKE_MODEL)
SLOT_NBYTES = 16 * KIND.position_nbytes + 64


def store(slots: int, *, shared: bool = False, published: PublishedContents | None = None) -> KvStore:
    clock = asyncio.get_running_loop().time
    arena = HostArena(HEADER_NBYTES + slots * SLOT_NBYTES, instance_id="text", epoch=1)
    held = ArenaStore(arena, LeaseLimits(), max_pull_s=1.0, clock=clock, copy=InlineOffload(1))
    return KvStore(held, KIND, shared=shared, rng=random.Random(1), clock=clock, published=published)


def segments(count: int) -> tuple[KvSegment, ...]:
    return KIND.segments(0, 16 * count)


def queue_position(due_s: float) -> QueuePosition:
    return QueuePosition(0, due_s, int(due_s))


async def at_once(reserving: Awaitable[list[Slot]]) -> list[Slot]:
    async with asyncio.timeout(0.001):
        return await reserving


def test_room_is_given_in_turn_and_none_overtakes() -> None:
    async def scenario() -> None:
        kv = store(4)
        order: list[str] = []

        async def waits(name: str, count: int, due_s: float) -> list[Slot]:
            slots = await kv.reserve(segments(count), queue_position(due_s))
            order.append(name)
            return slots

        held = await at_once(kv.reserve(segments(3), queue_position(0)))
        async with asyncio.TaskGroup() as group:
            small = group.create_task(waits("small", 1, 3.0))
            large = group.create_task(waits("large", 4, 2.0))
            gone = group.create_task(waits("gone", 4, 1.0))
            await asyncio.sleep(1)
            assert order == ["small"], "it came when there was room, and nobody before it"
            kv.abandon(await small)
            gone.cancel()
            await asyncio.sleep(1)
            assert order == ["small"]
            kv.abandon(held)
        assert order == ["small", "large"]
        kv.abandon(large.result())
        assert kv.store.memory.leased_bytes == 0
        kv.store.memory.validate()

    under_virtual_time(scenario)


def test_one_that_leaves_as_it_gets_room_gives_it_back() -> None:
    async def scenario() -> None:
        kv = store(1)
        held = await at_once(kv.reserve(segments(1), queue_position(0)))
        leaving = asyncio.get_running_loop().create_task(kv.reserve(segments(1), queue_position(1)))
        await asyncio.sleep(1)
        kv.abandon(held)
        leaving.cancel()
        await asyncio.wait((leaving,))
        assert kv.store.memory.leased_bytes == 0

    under_virtual_time(scenario)


def test_room_in_pieces_is_waited_for_until_it_is_in_one_piece() -> None:
    async def scenario() -> None:
        kv = store(2)
        halves = kv.reserve_now([KvSegment(KIND, 0, 8) for _ in range(3)])
        assert len(halves) == 3
        kv.abandon((halves[0], halves[2]))
        waiting = asyncio.get_running_loop().create_task(kv.reserve(segments(1), queue_position(0)))
        await asyncio.sleep(1)
        assert kv.store.memory.available_bytes >= SLOT_NBYTES
        assert not waiting.done()
        kv.abandon(halves[1:2])
        kv.abandon(await at_once(waiting))
        assert kv.store.memory.leased_bytes == 0

    under_virtual_time(scenario)


def test_what_never_fits_and_what_shares_the_arena_gets_what_there_is() -> None:
    async def scenario() -> None:
        for kv in (store(2), store(2, shared=True)):
            slots = await at_once(kv.reserve(segments(3), queue_position(0)))
            assert [slot.tokens for slot in slots] == [16, 16]
            kv.abandon(slots)
            assert kv.store.memory.leased_bytes == 0
        shared = store(2, shared=True)
        held = await at_once(shared.reserve(segments(1), queue_position(0)))
        assert len(await at_once(shared.reserve(segments(2), queue_position(0)))) == 1
        assert await at_once(shared.reserve(segments(2), queue_position(0))) == []
        shared.abandon(held)

    under_virtual_time(scenario)


def test_segments_and_kv_transfers_are_counted() -> None:
    metrics = Metrics()
    record = TextRecord(metrics, FAKE_MODEL)
    record.kv_segments("sealed", nbytes=100)
    record.kv_segments("computed", 3)
    record.kv_transferred(0, 0.5, "asked")
    record.kv_transferred(2, 0.5, "switch")
    text = metrics.render().decode()
    for line in (
        'triptych_kv_segments_total{outcome="sealed"} 1.0',
        'triptych_kv_segments_total{outcome="computed"} 3.0',
        'triptych_kv_segment_bytes_total{outcome="sealed"} 100.0',
        'triptych_kv_transfers_total{why="asked",with_segments="no"} 1.0',
        'triptych_kv_transfers_total{why="switch",with_segments="yes"} 1.0',
        'triptych_text_stage_seconds_sum{stage="prefill"} 1.0',
    ):
        assert line in text


def test_whole_segments_are_told_to_routers_until_they_are_evicted() -> None:
    async def scenario() -> None:
        published = PublishedContents(10)
        kv = store(2, published=published)
        whole, last = KIND.segments(0, 24)
        names = [bytes([number]) * 32 for number in range(3)]
        for name, segment in zip(names, (whole, last), strict=False):
            (slot,) = kv.reserve_now((segment,))
            await kv.seal(slot, name, segment)
        assert (kv.has(names[0], whole), kv.has(names[1], last), kv.has(names[2], whole)) == (True, True, False)
        assert published.all() == [names[0][:16]]
        kv.abandon(kv.reserve_now((whole, whole)))
        assert published.all() == []

    under_virtual_time(scenario)
