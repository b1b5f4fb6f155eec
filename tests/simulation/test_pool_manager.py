"""Pool managers that die, hang, forget and are cut off, and instances that register, drain and die, under load."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from tests.examples import seeds
from tests.simulation.cluster import SimCluster, World, running
from tests.simulation.workload import make_asks, play
from triptych.domain.pool import MemberCondition, MemberStatus
from triptych.errors import DeadlineExceeded, NotFound, Unavailable
from triptych.virtual import virtual_time

Scenario = Callable[[SimCluster], Coroutine[Any, Any, None]]


class _Defects(logging.Handler):
    """Unexpected exceptions, which services log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def simulate(world: World, scenario: Scenario, *, limit_s: float = 1200) -> None:
    async def main() -> None:
        async with running(world) as cluster:
            await scenario(cluster)
            await cluster.check_nothing_is_held()

    logging.getLogger().addHandler(defects := _Defects())
    try:
        virtual_time.run(main(), seed=world.seed, limit_s=limit_s)
        assert not defects.found, defects.found[0]
    except BaseException as error:
        error.add_note(f"seed {world.seed}")
        raise
    finally:
        logging.getLogger().removeHandler(defects)


async def known(cluster: SimCluster) -> dict[str, str]:
    """The state of every instance that the router knows."""
    lines = (await cluster.router.readiness()).instances
    return dict(line.split(": ", 1) for line in lines)


async def whole(cluster: SimCluster) -> None:
    """Wait until every instance is ready at the router, and active at every pool manager."""
    async with asyncio.timeout(120):
        while True:
            states = await known(cluster)
            lists = [await members(cluster, address) for address in cluster.managers]
            if (
                states == dict.fromkeys(cluster.processes, "ready")
                and all(listed.keys() == cluster.processes.keys() for listed in lists)
                and all(member.condition is MemberCondition.ACTIVE for listed in lists for member in listed.values())
                and not cluster.source.fault
            ):
                return
            await asyncio.sleep(0.1)


async def members(cluster: SimCluster, address: str) -> dict[str, MemberStatus]:
    status = await cluster.managers[address].service.status()
    instances = (member for pool in status.pools if pool.role is not None for member in pool.members)
    return {member.registration.instance_id: member for member in instances}


async def trouble(cluster: SimCluster, rng: Random, what: str) -> None:
    """One fault of a pool manager, or of the network around it, and its end."""
    manager = cluster.managers[rng.choice(list(cluster.managers))]
    lasts_s = rng.choice((0.5, 4.0, 12.0))
    match what:
        case "dies":
            await manager.kill()
            await asyncio.sleep(lasts_s)
            manager.start()
        case "hangs":
            for link in manager.links.values():
                link.stall()
            await asyncio.sleep(lasts_s)
            for link in manager.links.values():
                link.resume()
        case "is cut off":
            cut = rng.sample(sorted(manager.links), rng.randint(1, len(manager.links)))
            for name in cut:
                manager.links[name].kill()
            await asyncio.sleep(lasts_s)
            for name in cut:
                manager.links[name].restart(manager.service)
    await asyncio.sleep(rng.uniform(0, 3))


MANAGER_TROUBLE = ("dies", "hangs", "is cut off")


@pytest.mark.parametrize("seed", seeds(15, usual=5))
def test_whatever_happens_to_pool_managers_every_request_is_answered_right(seed: int) -> None:
    rng = Random(seed)

    async def scenario(cluster: SimCluster) -> None:
        async def change() -> None:
            for _ in range(5):
                await trouble(cluster, rng, rng.choice(MANAGER_TROUBLE))

        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, make_asks(seed, 60, rate_per_s=2, distinct_images=300)))
            group.create_task(change())
        for reply in playing.result():
            reply.check_right()
        await whole(cluster)

    simulate(World(seed=seed, encoders=2, texts=2, hybrids=1, managers=1 + seed % 2), scenario)


@pytest.mark.parametrize("seed", seeds(15, usual=5))
def test_with_managers_and_instances_that_fail_every_request_has_its_answer_or_one_clear_error(seed: int) -> None:
    rng = Random(seed)

    async def instances(cluster: SimCluster) -> None:
        for _ in range(6):
            await asyncio.sleep(rng.uniform(0.5, 5))
            node = cluster.processes[rng.choice(list(cluster.processes))]
            if rng.random() < 0.4:
                await drained(cluster, node.name)
            await node.kill()
            await asyncio.sleep(rng.choice((0.1, 5.0, 15.0)))
            await node.start()

    async def scenario(cluster: SimCluster) -> None:
        async def managers() -> None:
            for _ in range(4):
                await trouble(cluster, rng, rng.choice(MANAGER_TROUBLE))

        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, make_asks(seed, 80, rate_per_s=2, distinct_images=300)))
            group.create_task(managers())
            group.create_task(instances(cluster))
        for reply in playing.result():
            if reply.error is None:
                reply.check_right()
            else:
                assert isinstance(reply.error, Unavailable), reply.error
        await whole(cluster)
        for reply in await play(cluster.router, make_asks(seed + 1000, 8)):
            reply.check_right()

    simulate(World(seed=seed, encoders=2, texts=2, hybrids=1, managers=1 + seed % 2), scenario)


async def drained(cluster: SimCluster, name: str) -> None:
    """Ask a pool manager to drain an instance; wait a while for it, as its manager may be in trouble."""
    manager = next(iter(cluster.managers.values()))
    try:
        await manager.way("operator").drain_instance(name, force=True)
    except (NotFound, Unavailable, DeadlineExceeded):
        return
    await asyncio.sleep(5)


@pytest.mark.parametrize("seed", range(5))
def test_an_instance_that_is_drained_by_order_and_then_killed_loses_no_request(seed: int) -> None:
    rng = Random(seed)

    async def scenario(cluster: SimCluster) -> None:
        async def roll() -> None:
            """Replace every instance, one at a time."""
            for name, node in cluster.processes.items():
                await asyncio.sleep(rng.uniform(0, 1))
                await cluster.managers["m0:1"].way("operator").drain_instance(name, force=True)
                async with asyncio.timeout(60):
                    while (await members(cluster, "m0:1"))[name].condition is not MemberCondition.DRAINED:  # noqa: ASYNC110 - virtual time
                        await asyncio.sleep(0.1)
                await node.kill()
                await node.start()
                await whole(cluster)

        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, make_asks(seed, 60, rate_per_s=10, distinct_images=300)))
            group.create_task(roll())
        for reply in playing.result():
            reply.check_right()

    simulate(World(seed=seed, encoders=2, texts=2, hybrids=1, managers=1), scenario)


def test_an_instance_that_the_managers_lost_but_the_router_reaches_goes_on_working() -> None:
    async def scenario(cluster: SimCluster) -> None:
        manager = cluster.managers["m0:1"]
        for name in ("e0", "t0"):
            manager.links[name].kill()
        await asyncio.sleep(30)
        assert (await members(cluster, "m0:1")).keys() == {"e1", "t1"}
        assert await known(cluster) == dict.fromkeys(("e0", "e1", "t0", "t1"), "ready")
        replies = await play(cluster.router, make_asks(5, 60, rate_per_s=20, distinct_images=300))
        for reply in replies:
            reply.check_right()
        timelines = [await cluster.router.timeline(reply.ask.request.request_id) for reply in replies]
        assert {timeline.text_instance for timeline in timelines} == {"t0", "t1"}

    simulate(World(seed=5, encoders=2, texts=2, managers=1), scenario)
