"""Whole clusters of instances that prefill and instances that decode: the answers are those of one instance, whatever breaks."""

import asyncio
from dataclasses import replace

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, play_while, simulate
from tests.simulation.workload import Ask, make_asks, play
from triptych.domain.stage import Role
from triptych.domain.timeline import Timeline
from triptych.policy.policies import PolicyNames
from triptych.testing.damage import SomeDamaged

APART = World(texts=0, prefills=2, decodes=2)


async def timelines(cluster: SimCluster, asks: list[Ask]) -> list[Timeline]:
    return [await cluster.router.timeline(ask.request.request_id) for ask in asks]


@pytest.mark.parametrize("chunk_tokens", [16, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_answers_of_instances_apart_are_right(seed: int, chunk_tokens: int) -> None:
    asks = make_asks(seed, 60, images=(0, 4))

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        told = await timelines(cluster, asks)
        handed = [timeline for timeline in told if timeline.prefill_instance]
        assert len(handed) > len(asks) / 2
        assert {timeline.prefill_instance for timeline in handed} == {"p0", "p1"}
        assert {timeline.text_instance for timeline in handed} == {"d0", "d1"}
        assert not any(timeline.continuations for timeline in told)
        assert sum(timeline.kv_pulled_tokens + timeline.kv_cached_tokens for timeline in handed) > 0
        assert not any(timeline.kv_computed_tokens for timeline in handed), "nothing is computed twice"

    simulate(replace(APART, seed=seed, chunk_tokens=chunk_tokens), scenario)


@pytest.mark.parametrize("role", [Role.EP, Role.ED])
def test_answers_are_right_where_instances_encode_as_well(role: Role) -> None:
    asks = make_asks(5, 40, images=(0, 4))
    world = replace(
        APART,
        encoders=0,
        hybrids=2,
        hybrid_role=role,
        prefills=0 if role is Role.EP else 2,
        decodes=0 if role is Role.ED else 2,
    )

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        assert any(timeline.prefill_instance for timeline in await timelines(cluster, asks))

    simulate(world, scenario)


@pytest.mark.parametrize("kv_transfer", ["never", "by-need", "always"])
def test_answers_are_right_where_some_instances_do_both(kv_transfer: str) -> None:
    asks = make_asks(6, 60, images=(0, 2))

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        senders = {timeline.prefill_instance for timeline in await timelines(cluster, asks)}
        assert "p0" in senders
        assert ("t0" in senders) is (kv_transfer != "never")

    world = World(texts=1, prefills=1, decodes=2, router={"policies": PolicyNames(kv_transfer=kv_transfer)})
    simulate(world, scenario)


def test_answers_are_right_where_there_is_little_memory_for_them() -> None:
    """Prompts wait at the router instead of being computed for nobody."""
    asks = make_asks(7, 60, images=(0, 2), rate_per_s=None)
    most = 0

    async def scenario(cluster: SimCluster) -> None:
        nonlocal most

        async def watch() -> None:
            nonlocal most
            for _ in range(200):
                await asyncio.sleep(0.01)
                most = max(most, cluster.router.cluster.machine.waiting_for_kv)

        check_right(await play_while(cluster, asks, watch()))
        assert most > 5

    simulate(replace(APART, kv_tokens=600), scenario)


@pytest.mark.parametrize("kv_arena_bytes", [0, 2 << 10, 16 << 10])
def test_answers_are_right_where_segments_have_little_room(kv_arena_bytes: int) -> None:
    asks = make_asks(8, 40, images=(0, 2))

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))

    simulate(replace(APART, kv_arena_bytes=kv_arena_bytes), scenario)


def test_damaged_segments_are_computed() -> None:
    asks = make_asks(9, 40, images=(0, 2))
    damage = SomeDamaged("p", one_of=3)

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        assert damage.count
        assert any(timeline.kv_computed_tokens for timeline in await timelines(cluster, asks))

    simulate(replace(APART, damage=damage), scenario)


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("at_s", [0.1, 0.2, 0.3, 0.5])
def test_one_that_dies_costs_no_answer(victim: str, at_s: float) -> None:
    asks = make_asks(10, 60, images=(0, 2), rate_per_s=200.0)

    async def scenario(cluster: SimCluster) -> None:
        async def kill() -> None:
            await asyncio.sleep(at_s)
            await cluster.processes[victim].kill()

        check_right(await play_while(cluster, asks, kill()))

    simulate(APART, scenario)


def test_one_that_drains_hands_its_answers_over() -> None:
    asks = make_asks(11, 60, images=(0, 2), rate_per_s=200.0)

    async def scenario(cluster: SimCluster) -> None:
        async def drain() -> None:
            await asyncio.sleep(0.2)
            await cluster.processes["d0"].drain()

        check_right(await play_while(cluster, asks, drain()))

    simulate(replace(APART, text={"transfer_kv_on_drain": True}), scenario)
