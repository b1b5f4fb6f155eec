"""Leases under virtual time: none leaks after a lost response, none expires while needed."""

import asyncio
from dataclasses import replace
from itertools import count
from random import Random
from secrets import token_bytes

import pytest

from tests.simulation.cluster import EncoderNode, SimCluster, World
from tests.simulation.test_cluster import check_right, simulate
from tests.simulation.workload import make_asks, play
from triptych.domain.encoding import EncodeRequest
from triptych.errors import ArenaFull
from triptych.machine.router.request import RequestLimits
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.media import png
from triptych.virtual.links import Fault


@pytest.mark.parametrize("seed", range(6))
def test_a_response_that_crosses_its_cancellation_leaks_no_lease(seed: int) -> None:
    """Clients cancel while encodes are answered; links are slow, so that many responses are in flight then."""
    rng = Random(seed)
    asks = [
        replace(ask, leave_after_s=rng.uniform(0.05, 0.4)) for ask in make_asks(seed, 60, rate_per_s=80, images=(1, 4))
    ]

    async def scenario(cluster: SimCluster) -> None:
        await play(cluster.router, asks)
        await asyncio.sleep(3.0)
        assert not cluster.held(), cluster.held()

    simulate(World(seed=seed, latency_s=(0.02, 0.1)), scenario)


@pytest.mark.parametrize("seed", range(3))
def test_an_encode_whose_response_is_lost_leaks_no_lease(seed: int) -> None:
    rng = Random(seed)

    def fault(link: str, method: str) -> Fault:
        return Fault.REPLY_LOST if method == "encode" and rng.random() < 0.1 else Fault.NONE

    async def scenario(cluster: SimCluster) -> None:
        await play(cluster.router, make_asks(seed, 60, rate_per_s=80, images=(1, 3)))
        await asyncio.sleep(3.0)
        assert not cluster.held(), cluster.held()

    simulate(World(seed=seed, fault=fault), scenario)


@pytest.mark.parametrize("max_lease_s", [20.0, 60.0])
def test_a_request_that_waits_for_minutes_at_its_text_instance_is_encoded_once(max_lease_s: float) -> None:
    """Leases expire early, and other requests evict every embedding without a lease."""
    asks = make_asks(3, 4, rate_per_s=None, images=(3, 4), timeout_s=590.0, distinct_images=400)
    images = {part.data for ask in asks for part in ask.request.media}

    async def evict_unleased(cluster: SimCluster) -> None:
        """Embeddings as large as the unleased part of the arenas, one after the other."""
        for number in count():
            await asyncio.sleep(1.0)
            for node in cluster.encoders:
                await encode_alone(node, png(56, 56, seed=10_000 + number))

    async def scenario(cluster: SimCluster) -> None:
        cluster.texts[0].engine.step_s = 15.0
        async with asyncio.TaskGroup() as group:
            pushing = group.create_task(evict_unleased(cluster))
            replies = await play(cluster.router, asks)
            pushing.cancel()
        check_right(replies)
        assert max(reply.ended_s - reply.ask.at_s for reply in replies) > 180.0
        encoded = [
            item.encode_attempts
            for ask in asks
            for item in (await cluster.router.timeline(ask.request.request_id)).items
        ]
        assert encoded == [1] * len(encoded)
        assert len(encoded) >= len(images)

    world = World(
        seed=3,
        encoder_arena_bytes=6 * 1024,
        text_arena_bytes=2 * 1024,
        max_running=1,
        router={"attempts": RequestLimits(max_lease_s=max_lease_s)},
    )
    simulate(world, scenario, limit_s=900)


async def encode_alone(node: EncoderNode, media: bytes) -> None:
    """An encode call of another router; its leases are released at once."""
    info = inspect_media(media, MediaLimits())
    leases = (token_bytes(16), token_bytes(16))
    request = EncodeRequest("other", 0, FAKE_MODEL.model_id, media, info, 1000, b"", 5.0, 5.0, *leases)
    try:
        await node.service.encode(request)
    except ArenaFull:
        return
    await node.service.release(leases)
