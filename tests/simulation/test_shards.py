"""Items split over several encoders: right answers, faults redone shard by shard, no leaks, under virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, play_while, simulate
from tests.simulation.workload import Ask, make_asks, play
from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, TextPart
from triptych.domain.embedding import Ticket
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Stage
from triptych.domain.timeline import ItemTimeline
from triptych.errors import TransferFailed
from triptych.policy.sharding import ShardLimits
from triptych.testing.media import png

CUT = {"shards": ShardLimits(min_shard_tokens=4)}
TALL = png(14 * 4, 14 * 64, seed=1)
"""256 positions in 64 rows."""


def ask(*images: bytes, name: str = "one", at_s: float = 0.0) -> Ask:
    parts: tuple[Part, ...] = (
        TextPart("w7"),
        *(MediaPart(Modality.IMAGE, image) for image in images),
        TextPart("w9 w11"),
    )
    sampling = SamplingParams(temperature=0, max_tokens=20)
    return Ask(at_s, ChatRequest(name, "fake", (Message("user", parts),), sampling, timeout_s=60.0))


async def items(cluster: SimCluster, name: str = "one") -> tuple[ItemTimeline, ...]:
    return (await cluster.router.timeline(name)).items


def test_a_large_item_is_encoded_by_all_idle_encoders_at_once() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, [ask(TALL)]))
        done = await items(cluster)
        assert [(item.item, item.tokens, item.shard) for item in done] == [
            (0, 64, "1-16/64"),
            (0, 64, "17-32/64"),
            (0, 64, "33-48/64"),
            (0, 64, "49-64/64"),
        ]
        assert len({item.encoder for item in done}) == 4

    simulate(World(encoders=4, router=CUT), scenario)


def test_sharding_divides_the_encode_time() -> None:
    took_s: dict[int, float] = {}
    for min_tokens in (0, 4):

        async def scenario(cluster: SimCluster, min_tokens: int = min_tokens) -> None:
            check_right(await play(cluster.router, [ask(TALL)]))
            took_s[min_tokens] = (await cluster.router.timeline("one")).encode_s

        simulate(World(encoders=4, router={"shards": ShardLimits(min_tokens)}), scenario)
    assert took_s[4] < 0.5 * took_s[0], took_s


def test_items_keep_their_order_and_small_ones_are_not_split() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, [ask(png(20, 20), TALL, png(14, 14, seed=2), TALL)]))
        done = await items(cluster)
        assert sorted({item.item for item in done}) == [0, 1, 2, 3]
        assert [item.shard for item in done if item.item in (0, 2)] == ["", ""]
        assert sum(item.tokens for item in done) == 4 + 256 + 1 + 256

    simulate(World(encoders=3, router=CUT), scenario)


def test_a_cached_item_is_split_alike_and_not_encoded_again() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, [ask(TALL)]))
        encoded = sum(node.engine.encoded_items for node in cluster.encoders)
        others = make_asks(3, 10, rate_per_s=None, images=(1, 3))
        check_right(await play(cluster.router, [*others, ask(TALL, name="again", at_s=0.01)]))
        again = await items(cluster, "again")
        assert len(again) == 4
        assert all(item.encoder_cached or item.text_cached for item in again)
        assert encoded == 4

    simulate(World(encoders=4, router=CUT), scenario)


@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_workload_in_shards_is_answered_correctly(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, make_asks(seed, 25, rate_per_s=60, distinct_images=100)))

    simulate(World(seed=seed, encoders=5, texts=2, router=CUT), scenario)


@pytest.mark.parametrize("seed", range(2))
def test_only_the_shards_of_a_killed_encoder_are_encoded_again(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        victim = cluster.encoders[seed]

        async def kill() -> None:
            await asyncio.sleep(0.012)
            assert victim.service.load().at(Stage.ENCODE).pending > 0, "it is killed while requests run"
            await victim.kill()

        check_right(await play_while(cluster, [ask(TALL)], kill()))
        done = await items(cluster)
        assert sorted(item.encode_attempts for item in done) == [1, 1, 1, 2]
        assert victim.name not in {item.encoder for item in done}

    simulate(World(seed=seed, encoders=4, router=CUT), scenario)


@pytest.mark.parametrize("seed", range(2))
def test_restarting_encoders_lose_no_answer(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        async def faults() -> None:
            for node in cluster.encoders[:2]:
                await asyncio.sleep(0.15)
                await node.kill()
                await asyncio.sleep(0.1)
                await node.start()

        asks = make_asks(seed, 30, rate_per_s=150, distinct_images=200)
        check_right(await play_while(cluster, asks, faults()))

    simulate(World(seed=seed, encoders=4, router=CUT), scenario)


def failing_once() -> Callable[[str, Ticket], Awaitable[None]]:
    """The first pull of every second embedding fails."""
    seen: set[bytes] = set()

    async def before_pull(_: str, ticket: Ticket) -> None:
        if ticket.key not in seen:
            seen.add(ticket.key)
            if len(seen) % 2:
                raise TransferFailed("the link broke")

    return before_pull


def test_only_a_shard_that_cannot_be_pulled_is_encoded_again() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, [ask(TALL)]))
        attempts = [item.encode_attempts for item in await items(cluster)]
        assert set(attempts) == {1, 2}, attempts

    simulate(World(encoders=4, router=CUT, before_pull=failing_once()), scenario)


@pytest.mark.parametrize("seed", range(2))
def test_arenas_that_hold_one_request_at_a_time_make_the_others_wait(seed: int) -> None:
    """Credits for all shards of all items or none: a request with credits never waits for more."""

    async def scenario(cluster: SimCluster) -> None:
        tall = [png(14 * 4, 14 * 64, seed=number) for number in range(6)]
        asks = [ask(image, tall[-1 - number], name=f"r{number}") for number, image in enumerate(tall)]
        check_right(await play(cluster.router, asks))

    world = World(seed=seed, encoders=4, router=CUT, encoder_arena_bytes=8 * 1024, text_arena_bytes=20 * 1024)
    simulate(world, scenario, limit_s=300)
