"""Requests through several routers of a simulated cluster, each at one of them at random."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.simulation.cluster import SimCluster
from tests.simulation.workload import Ask, play
from triptych.domain.timeline import Timeline
from triptych.virtual.links import Link, LinkedInstance


@dataclass(frozen=True, slots=True)
class Played:
    lines: list[Timeline]
    """Of all requests."""
    took_s: float


async def play_through(
    cluster: SimCluster,
    names: Sequence[str],
    asks: Sequence[Ask],
    *,
    seed: int,
    instance: Callable[[Link[Any]], LinkedInstance] = LinkedInstance,
) -> Played:
    """Send them, and wait for their ends. Raises AssertionError if an answer is wrong.

    ``names``: of routers beside the cluster's own. ``instance``: what each has of an instance, over its link to it.
    """

    def connecting(name: str) -> Callable[[str], LinkedInstance]:
        def connect(address: str) -> LinkedInstance:
            reached = cluster.name_at(address)
            return instance(cluster.link(f"{name}->{reached}", cluster.processes[reached]))

        return connect

    routers = [cluster.make_router(cluster.source, connecting(name), name=name) for name in names]
    await asyncio.sleep(1.0)
    rng = Random(f"{seed}/routers")
    shares: list[list[Ask]] = [[] for _ in routers]
    for ask in asks:
        rng.choice(shares).append(ask)
    began_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(play(router, share)) for router, share in zip(routers, shares, strict=True)]
        took_s = asyncio.get_running_loop().time() - began_s
        lines: list[Timeline] = []
        for router, played in zip(routers, playing, strict=True):
            for reply in played.result():
                reply.check_right()
                lines.append(await router.timeline(reply.ask.request.request_id))
        return Played(lines, took_s)
    finally:
        for router in routers:
            router.close()
