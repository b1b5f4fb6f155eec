"""Instances that join, leave and die under load: every request ends, none that could be answered is lost."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Literal

import pytest

from tests.examples import seeds
from tests.simulation.cluster import SimCluster, World, running
from tests.simulation.workload import make_asks, play
from triptych.domain.membership import MemberState
from triptych.errors import EngineFailure, Unavailable
from triptych.virtual import virtual_time

ACTIVE, LEAVING, LEFT = MemberState.ACTIVE, MemberState.LEAVING, MemberState.LEFT
_CHANGES: tuple[MemberState | Literal["dies", "starts"] | None, ...] = (ACTIVE, LEAVING, LEFT, None, "dies", "starts")
Scenario = Callable[[SimCluster], Coroutine[Any, Any, None]]


def simulate(world: World, scenario: Scenario) -> None:
    async def main() -> None:
        async with running(world) as cluster:
            await scenario(cluster)
            await cluster.check_nothing_is_held()

    try:
        virtual_time.run(main(), seed=world.seed, limit_s=600)
    except BaseException as error:
        error.add_note(f"seed {world.seed}")
        raise


async def known(cluster: SimCluster) -> dict[str, str]:
    """The state of every instance that the router knows."""
    lines = (await cluster.router.readiness()).instances
    return dict(line.split(": ", 1) for line in lines)


async def gone(cluster: SimCluster, name: str) -> None:
    async with asyncio.timeout(60):
        while name in await known(cluster):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.005)


def spread(seed: int, **changes: Any) -> World:
    return World(seed=seed, encoders=2, texts=2, hybrids=1, **changes)


@pytest.mark.parametrize("seed", seeds(30, usual=8))
def test_a_member_removed_from_the_list_can_be_killed_after_its_removal_without_losses(seed: int) -> None:
    rng = Random(seed)

    async def scenario(cluster: SimCluster) -> None:
        async def change() -> None:
            for _ in range(4):
                await asyncio.sleep(rng.uniform(0.02, 0.15))
                name = rng.choice(("e0", "e1", "t0", "t1", "h0"))
                cluster.membership.set(name, rng.choice((LEAVING, None)))
                if rng.random() < 0.7:
                    await gone(cluster, name)
                    node = cluster.processes[name]
                    await node.kill()
                    await node.start()
                else:
                    await asyncio.sleep(rng.uniform(0, 0.02))  # it is listed again
                cluster.membership.set(name, ACTIVE)
                cluster.validate()
                await until_ready(cluster)

        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, make_asks(seed, 30, rate_per_s=60, distinct_images=300)))
            group.create_task(change())
        for reply in playing.result():
            reply.check_right()

    simulate(spread(seed), scenario)


async def until_ready(cluster: SimCluster) -> None:
    async with asyncio.timeout(60):
        while set((await known(cluster)).values()) != {"ready"} or len(await known(cluster)) < 5:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("seed", seeds(100, usual=12))
def test_under_random_membership_changes_every_request_has_its_answer_or_one_clear_error(seed: int) -> None:
    rng, deaths = Random(seed), 0

    async def change(cluster: SimCluster) -> None:
        nonlocal deaths
        for _ in range(12):
            await asyncio.sleep(rng.uniform(0, 0.08))
            name = rng.choice(list(cluster.processes))
            node = cluster.processes[name]
            to = rng.choice(_CHANGES)
            if to == "dies":
                deaths += node.is_up
                await node.kill()
            elif to == "starts":
                if not node.is_up:
                    await node.start()
            else:
                cluster.membership.set(name, to)
            cluster.validate()
        for name, node in cluster.processes.items():
            if not node.is_up:
                await node.start()
            cluster.membership.set(name, ACTIVE)

    async def scenario(cluster: SimCluster) -> None:
        asks = make_asks(seed, 24, rate_per_s=50, distinct_images=300)
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, asks))
            group.create_task(change(cluster))
        suspected = 0
        for reply in playing.result():
            if reply.error is None:
                reply.check_right()
            else:
                assert isinstance(reply.error, Unavailable | EngineFailure), reply.error
                suspected += isinstance(reply.error, EngineFailure)
        assert suspected <= deaths // 2, "a request fails alone when two instances have died while they worked on it"
        await until_ready(cluster)
        for reply in await play(cluster.router, make_asks(seed + 1000, 8)):
            reply.check_right()

    simulate(spread(seed), scenario)


def test_work_of_a_member_that_left_is_redone_elsewhere_at_once() -> None:
    async def scenario(cluster: SimCluster) -> None:
        async def leave() -> None:
            await asyncio.sleep(0.25)
            for name in ("e0", "t0"):
                for link in cluster.processes[name].links:
                    link.stall()  # it neither responds nor fails: only the membership source reports its end
                cluster.membership.set(name, LEFT)
            await asyncio.sleep(0.001)
            cluster.validate()
            assert not {"e0", "t0"} & set(await known(cluster))

        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, make_asks(3, 60, rate_per_s=200, distinct_images=300)))
            group.create_task(leave())
        assert loop.time() < began_s + 3, "no request waited for a missed heartbeat"
        for reply in playing.result():
            reply.check_right()
        for name in ("e0", "t0"):
            for link in cluster.processes[name].links:
                link.resume()

    simulate(World(seed=3, encoders=2, texts=2), scenario)


def test_the_last_leaving_text_instance_finishes_and_new_requests_wait_for_another() -> None:
    async def scenario(cluster: SimCluster) -> None:
        async def swap() -> None:
            await asyncio.sleep(0.2)
            cluster.membership.set("t0", None)
            await asyncio.sleep(0.3)
            cluster.membership.set("t1", ACTIVE)

        cluster.membership.set("t1", None)
        await gone(cluster, "t1")
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, make_asks(9, 40, rate_per_s=100)))
            group.create_task(swap())
        for reply in playing.result():
            reply.check_right()
        assert await known(cluster) == {"e0": "ready", "e1": "ready", "t1": "ready"}

    simulate(World(seed=9, encoders=2, texts=2), scenario)
