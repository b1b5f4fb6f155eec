"""Instances that drain under load: they end soon, as no router forgets them while it holds leases there."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.simulation.cluster import EncoderNode, SimCluster, TextNode, World
from tests.simulation.test_cluster import check_right, simulate
from tests.simulation.test_membership import gone, known
from tests.simulation.test_prefixes import KEPT, TOLD, make_turns
from tests.simulation.test_resolve import held, of_keys, of_media
from tests.simulation.workload import Ask, Reply, make_asks, play
from triptych.domain.membership import MemberState
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Role

ENDS_S = 3.0
QUIET: dict[str, Any] = {"load_reports": {"load_min_interval_s": 0.1}}
"""So long a router may not know that an instance drains."""
LOST_S = 8.0
"""Until a leaving instance that has died is forgotten."""
TRANSFERS_KV: dict[str, Any] = {"transfer_kv_on_drain": True}
SLOW = World(texts=0, text_step_s=0.06, text=TRANSFERS_KV)
"""An answer that is transferred gets its next token after its sender's call has ended."""
SHARING = replace(SLOW, router=TOLD, text=KEPT | TRANSFERS_KV)
WORLDS = {
    "together": (replace(SLOW, texts=3), "t0"),
    "prefixes": (replace(SHARING, texts=3), "t0"),
    "prefill": (replace(SHARING, prefills=2, decodes=2), "p0"),
    "decode": (replace(SLOW, prefills=2, decodes=2), "d0"),
    "switching": (replace(SHARING, prefills=1, decodes=1, switching=2), "s0"),
    "two routers": (replace(SHARING, texts=3, routers=2), "t0"),
}
"""With the instance that drains."""


def long_answers(seed: int, count: int = 16) -> list[Ask]:
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    return [replace(turn, request=replace(turn.request, sampling=sampling)) for turn in make_turns(seed, count)]


async def played(cluster: SimCluster, asks: list[Ask]) -> list[Reply]:
    """By the routers that can fail, if there are any."""
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(cluster.clients()) if cluster.routers else cluster.router
        return await play(router, asks)


async def drained_after_s(cluster: SimCluster, node: EncoderNode | TextNode) -> float:
    began_s = cluster.clock()
    cluster.membership.set(node.name, MemberState.LEAVING)
    await node.drain()
    return cluster.clock() - began_s


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", WORLDS)
def test_an_instance_that_drains_ends_soon(kind: str, seed: int) -> None:
    world, name = WORLDS[kind]
    draw = Random(seed)

    async def scenario(cluster: SimCluster) -> None:
        node = cluster.processes[name]
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(played(cluster, long_answers(seed)))
            await asyncio.sleep(draw.uniform(0.5, 0.8))
            if kind == "switching":
                cluster.switching[1].switching.set_stages(Role.ED.stages, 1, "a test")
            took_s = await drained_after_s(cluster, node)
        check_right(playing.result())
        assert took_s < ENDS_S
        await node.kill()
        await gone(cluster, name)

    simulate(replace(world, seed=seed), scenario)


@pytest.mark.parametrize("seed", range(4))
def test_all_instances_but_one_of_each_kind_may_drain_at_once(seed: int) -> None:
    """Requests that were placed before the router knows of it are refused, again and again."""
    world = World(seed=seed, encoders=24, texts=24, encoder=QUIET, text=QUIET)

    async def scenario(cluster: SimCluster) -> None:
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, make_asks(seed, 120, images=(0, 2))))
            await asyncio.sleep(0.5)
            for node in (*cluster.encoders[1:], *cluster.texts[1:]):
                group.create_task(node.drain())
        check_right(playing.result())

    simulate(world, scenario)


def test_leases_of_a_router_that_died_hold_up_a_drain_for_a_bounded_time() -> None:
    async def scenario(cluster: SimCluster) -> None:
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(played(cluster, long_answers(3)))
            await asyncio.sleep(0.7)
            draining = group.create_task(drained_after_s(cluster, cluster.texts[0]))
            await asyncio.sleep(0.15)
            for router in cluster.routers:
                await router.kill()
            await asyncio.sleep(0.2)
            for router in cluster.routers:
                await router.start()
        check_right(playing.result())
        assert ENDS_S < draining.result() < 10 + ENDS_S, "what it has transferred is waited for, not to its leases' end"

    simulate(replace(WORLDS["together"][0], seed=3, routers=2), scenario)


def test_an_encoder_that_leaves_is_not_forgotten_while_its_embeddings_are_read_by_key() -> None:
    async def scenario(cluster: SimCluster) -> None:
        (node,) = cluster.encoders
        async with held(cluster, of_media(1, timeout_s=300.0)) as items:
            reading = held(cluster, of_keys(*items))
            await reading.__aenter__()
        await asyncio.sleep(1.0)
        async with asyncio.TaskGroup() as group:
            draining = group.create_task(drained_after_s(cluster, node))
            await asyncio.sleep(1.0)
            assert (await known(cluster))["e0"] == "leaving"
            await reading.__aexit__(None, None, None)
        assert draining.result() < 1.0 + ENDS_S
        await gone(cluster, "e0")

    simulate(World(seed=4, encoders=1, texts=0), scenario)


def test_an_instance_that_dies_while_it_leaves_is_forgotten_whatever_is_held_there() -> None:
    async def scenario(cluster: SimCluster) -> None:
        (node,) = cluster.encoders
        async with held(cluster, of_media(1, timeout_s=300.0)) as items, held(cluster, of_keys(*items)):
            cluster.membership.set("e0", MemberState.LEAVING)
            await asyncio.sleep(1.0)
            assert (await known(cluster))["e0"] == "leaving"
            await node.kill()
            async with asyncio.timeout(LOST_S):
                await gone(cluster, "e0")
            assert not cluster.held().keys() & {"router credits", "router leases"}
            await node.start()
            cluster.membership.set("e0", MemberState.ACTIVE)
            await asyncio.sleep(1.0)
        assert (await known(cluster))["e0"] == "ready"

    simulate(World(seed=5, encoders=1, texts=0), scenario)
