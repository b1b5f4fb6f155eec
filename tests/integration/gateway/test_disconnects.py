"""A thousand streams cut at random points, gateway and cluster in one process under virtual time."""

import asyncio
from collections import Counter
from random import Random

import pytest

from tests.integration.gateway.door import Door, make_gateway
from tests.integration.gateway.streams import STOPS_WITHIN_S, asked, stages, working
from tests.simulation.cluster import SimCluster, World, running
from triptych.virtual.offload import InlineOffload
from triptych.virtual.virtual_time import run

STREAMS = 1000
LATEST_CUT_S = 0.07
AT_ONCE = 25
ENGINE_STEP_S = 0.05
"""Above what a batch of the fake engines takes: what is being computed is computed to its end."""


async def cut(door: Door, cluster: SimCluster, rng: Random, number: int) -> str:
    """The state at the cut: ``waiting``, ``streaming``, or ``over``."""
    request_id = f"r{number}"
    leave = asyncio.Event()
    begun = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        ask = group.create_task(
            door.post(
                *asked(rng, images=rng.randrange(4)),
                request_id=request_id,
                leave=leave,
                on_body=lambda _: begun.set(),
            )
        )
        await asyncio.sleep(rng.uniform(0, LATEST_CUT_S))
        hit = "over" if ask.done() else "streaming" if begun.is_set() else "waiting"
        leave.set()
        await asyncio.sleep(STOPS_WITHIN_S + ENGINE_STEP_S)
        assert ask.done(), f"{request_id} still runs in the gateway"
    knowing = stages(cluster, request_id)
    assert not knowing, f"{request_id} still runs in {knowing}"
    return hit


@pytest.mark.timeout(240)
def test_a_cut_stream_stops_in_every_stage_without_leaks() -> None:
    async def play() -> None:
        rng = Random(11)
        clock = asyncio.get_running_loop().time
        async with running(World(encoders=2, texts=2)) as cluster:
            gateway = make_gateway(cluster.router, InlineOffload(), clock)
            door = Door(gateway, clock)
            hits: Counter[str] = Counter()
            for first in range(0, STREAMS, AT_ONCE):
                async with asyncio.TaskGroup() as group:
                    streams = [group.create_task(cut(door, cluster, rng, first + number)) for number in range(AT_ONCE)]
                hits.update(stream.result() for stream in streams)
                assert not working(cluster), working(cluster)
                assert (gateway.admission.requests, gateway.admission.nbytes) == (0, 0)
            assert min(hits["waiting"], hits["streaming"]) > STREAMS // 5, hits
            await cluster.check_nothing_is_held()

    run(play())
