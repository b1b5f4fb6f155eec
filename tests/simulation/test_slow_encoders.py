"""Encoders that are slow, or pause: items are hedged within a budget, and no lease is left by the call that loses."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from tests.examples import seeds
from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, play_while, simulate
from tests.simulation.workload import Ask, make_asks, play
from triptych.domain.chat import MediaPart, Message
from triptych.domain.media import Modality
from triptych.domain.timeline import ItemTimeline
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.testing.media import png
from triptych.workload.report import percentile

TOKEN_S = 0.005
"""Encoders take 50 ms for an image, so that three of them do 60 per second."""


def asks_for(seed: int, count: int, rate_per_s: float) -> list[Ask]:
    """One image each, all of one size."""
    asks = make_asks(seed, count, rate_per_s=rate_per_s, images=(0, 0))
    return [
        replace(ask, request=replace(ask.request, messages=(Message("user", (*parts, image)),)))
        for number, ask in enumerate(asks)
        for parts in [ask.request.messages[0].parts]
        for image in [MediaPart(Modality.IMAGE, png(40, 40, seed=1000 * seed + number))]
    ]


async def items_of(cluster: SimCluster, asks: list[Ask]) -> list[ItemTimeline]:
    lines = [await cluster.router.timeline(ask.request.request_id) for ask in asks]
    return [item for line in lines for item in line.items]


def p99_s(*, encoders: int, slower: float = 1.0, limits: ClusterLimits | None = None) -> tuple[float, float]:
    """The 99th percentile of encode times once the pool is known, and the share of encodes that were hedges."""
    found: list[float] = []

    async def scenario(cluster: SimCluster) -> None:
        for name in ("token_s", "batch_s", "prepare_s"):
            setattr(cluster.encoders[0].engine, name, slower * getattr(cluster.encoders[0].engine, name))
        asks = asks_for(1, 300, 30.0)
        check_right(await play(cluster.router, asks))
        # Before that the pool's times are not known.
        times = [(await cluster.router.timeline(ask.request.request_id)).encode_s for ask in asks[150:]]
        items = await items_of(cluster, asks)
        hedges = sum(item.hedges for item in items)
        found[:] = percentile(times, 99), hedges / (hedges + sum(item.encode_attempts for item in items))

    router = {"cluster": limits or ClusterLimits()}
    simulate(World(seed=1, encoders=encoders, texts=2, encode_token_s=TOKEN_S, router=router), scenario)
    return found[0], found[1]


def test_one_encoder_ten_times_slower_costs_little_at_the_99th_percentile() -> None:
    without, _ = p99_s(encoders=3)
    neither, _ = p99_s(encoders=4, slower=10.0, limits=ClusterLimits(hedge_share=0.0, outlier_factor=0.0))
    both, extra = p99_s(encoders=4, slower=10.0)
    assert neither > 3 * without, "the slow encoder matters"
    assert both <= 1.5 * without
    assert extra <= 0.05


def test_under_overload_next_to_nothing_is_hedged() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks_for(2, 150, 30.0)))
        loud = asks_for(3, 150, 250.0)
        check_right(await play(cluster.router, loud))
        assert sum(item.hedges for item in await items_of(cluster, loud)) <= 2, "at the begin and at the end"

    simulate(World(seed=2, encoders=3, texts=2, encode_token_s=TOKEN_S), scenario)


@pytest.mark.parametrize("seed", seeds(4, usual=1))
def test_pauses_of_encoders_are_hedged_and_leave_nothing_behind(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        rng = Random(f"{seed}/pauses")

        async def pause() -> None:
            await asyncio.sleep(5)
            for _ in range(4):
                node = rng.choice(cluster.encoders)
                node.hang()
                await asyncio.sleep(0.5)
                node.go_on()
                await asyncio.sleep(0.5)

        asks = asks_for(seed, 270, 30.0)
        check_right(await play_while(cluster, asks, pause()))
        items = await items_of(cluster, asks)
        assert sum(item.hedge_won for item in items) > 0
        assert sum(item.hedges for item in items) <= 0.05 * len(items)

    simulate(World(seed=seed, encoders=3, texts=2, encode_token_s=TOKEN_S), scenario)
