"""Two routers under load that die, break connections and come back: every answer is right, and nothing is left anywhere."""

import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from tests.examples import seeds
from tests.simulation.cluster import RouterNode, SimCluster, World, running
from tests.simulation.workload import make_asks, play
from triptych.virtual.virtual_time import run


async def kill_in_turns(nodes: Sequence[RouterNode], rng: Random, cluster: SimCluster) -> None:
    """Of the two routers one at a time, and now and then a text instance with them."""
    while True:
        node = rng.choice(nodes)
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        await node.kill()
        text = rng.choice(cluster.texts) if rng.random() < 0.3 else None
        if text is not None:
            await text.kill()
        await asyncio.sleep(rng.uniform(0.05, 1.0))
        if text is not None:
            await text.start()
        await node.start()
        await asyncio.sleep(0.5)  # it sees the instances again


@pytest.mark.parametrize("seed", seeds(12, usual=4))
def test_routers_that_die_cost_no_answer(seed: int) -> None:
    async def scenario() -> None:
        async with running(World(seed=seed, encoders=2, texts=3, routers=2, text_step_s=0.02)) as cluster:
            async with cluster.clients() as routers, asyncio.TaskGroup() as group:
                killing = group.create_task(kill_in_turns(cluster.routers, cluster.rng("victims"), cluster))
                replies = await play(routers, make_asks(seed, 60, rate_per_s=15.0, images=(0, 3)))
                killing.cancel()
            for reply in replies:
                reply.check_right()
            assert routers.continuations > 0
            await cluster.check_nothing_is_held()

    run(scenario())
