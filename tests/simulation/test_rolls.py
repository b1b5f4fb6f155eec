"""Pools that roll to another tensor-parallel degree under load: no request fails, and what does not come up changes nothing."""

import asyncio
from dataclasses import replace

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, play_while, simulate
from tests.simulation.workload import make_asks
from triptych.domain.decision import Bounds, ScalingStatus, Why
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.errors import FailedPrecondition, InvalidRequest, NotFound
from triptych.services.pool_manager.service import PoolManagerService
from triptych.testing.fakes import FAKE_MODEL

PD = PoolName(FAKE_MODEL.model_id, Role.PD)
BOUNDS = Bounds(1, 4)
WORLD = World(
    encoders=1,
    texts=3,
    managers=1,
    scaled=True,
    bounds=BOUNDS,
    router={"slo": ("ttft=600s",)},
    manager={
        "scaler": "127.0.0.1:1",
        "autoscale": True,
        "control": {"min_instances": BOUNDS.least, "max_instances": BOUNDS.most, "start_s": 5.0, "adopt_s": 2.0},
    },
)


def manager_of(cluster: SimCluster) -> PoolManagerService:
    (node,) = cluster.managers.values()
    return node.service


async def scaling_of(cluster: SimCluster) -> ScalingStatus:
    (pool,) = [pool for pool in (await manager_of(cluster).status()).pools if pool.name == PD]
    assert pool.scaling is not None
    return pool.scaling


async def until_rolled(cluster: SimCluster) -> str:
    """Wait for the end of a roll. Returns what is said of it."""
    async with asyncio.timeout(600):
        while (await scaling_of(cluster)).rolling:  # noqa: ASYNC110 - only the status says it
            await asyncio.sleep(0.5)
    reasons = [reason for decision in (await scaling_of(cluster)).decisions for reason in decision.reasons]
    return next(reason.text for reason in reversed(reasons) if reason.why is Why.DEGREE)


def degrees(cluster: SimCluster) -> dict[str, int]:
    """Of the text instances that run."""
    running = [node for node in cluster.texts if node.is_up and not node.drained]
    return {node.name: cluster.degrees.get(node.name, 1) for node in running}


def test_a_pool_rolls_under_load_without_a_failed_request() -> None:
    asks = make_asks(3, 400, images=(0, 1), rate_per_s=8.0)

    async def scenario(cluster: SimCluster) -> None:
        async def roll() -> None:
            await asyncio.sleep(15.0)
            await manager_of(cluster).roll(PD, 2)
            least = 3
            async with asyncio.timeout(600):
                while (await scaling_of(cluster)).rolling:
                    least = min(least, len(degrees(cluster)))
                    await asyncio.sleep(0.25)
            assert least == 3, "none is drained before its successor serves"

        check_right(await play_while(cluster, asks, roll()))
        assert await until_rolled(cluster) == "done: all 3 instances have degree 2"
        await asyncio.sleep(30.0)
        assert list(degrees(cluster).values()) == [2, 2, 2]
        assert (await scaling_of(cluster)).wanted == 3
        assert (await scaling_of(cluster)).override is None
        assert cluster.scaled is not None
        assert not cluster.scaled.book.violations

    simulate(WORLD, scenario)


def test_a_degree_that_does_not_come_up_leaves_the_pool_as_it_was() -> None:
    asks = make_asks(4, 200, images=(0, 1), rate_per_s=5.0)

    async def scenario(cluster: SimCluster) -> None:
        assert cluster.scaled is not None
        processes = cluster.scaled.processes

        async def roll() -> None:
            await asyncio.sleep(15.0)
            processes.crashes = True
            await manager_of(cluster).roll(PD, 2)
            assert (await until_rolled(cluster)).startswith("aborted: an instance with degree 2 did not start: ")
            processes.crashes = False

        check_right(await play_while(cluster, asks, roll()))
        await asyncio.sleep(90.0)
        assert degrees(cluster) == {"t0": 1, "t1": 1, "t2": 1}
        assert (await scaling_of(cluster)).wanted == 3
        assert cluster.scaled.scaler.degree(str(PD)) == 1, "what starts from now on has the old degree"

    simulate(WORLD, scenario)


def test_a_roll_that_cannot_begin_is_refused_with_the_reason() -> None:
    async def scenario(cluster: SimCluster) -> None:
        await asyncio.sleep(15.0)
        manager = manager_of(cluster)
        with pytest.raises(NotFound, match="no pool has this model, role and tier"):
            await manager.roll(PoolName("m", Role.PD), 2)
        with pytest.raises(InvalidRequest, match="have degree 1"):
            await manager.roll(PD, 1)
        with pytest.raises(InvalidRequest, match="there are 8 devices"):
            await manager.roll(PD, 16)
        await manager.roll(PD, 2)
        with pytest.raises(FailedPrecondition, match="rolls from tensor-parallel degree 1 to 2"):
            await manager.roll(PD, 4)
        await until_rolled(cluster)

    simulate(WORLD, scenario)


def test_of_two_orders_to_roll_at_the_same_time_one_is_refused() -> None:
    async def scenario(cluster: SimCluster) -> None:
        await asyncio.sleep(15.0)
        manager = manager_of(cluster)
        first, second = await asyncio.gather(manager.roll(PD, 2), manager.roll(PD, 4), return_exceptions=True)
        assert first is None
        assert isinstance(second, FailedPrecondition)
        assert await until_rolled(cluster) == "done: all 3 instances have degree 2"
        assert cluster.scaled is not None
        assert cluster.scaled.scaler.degree(str(PD)) == 2

    simulate(WORLD, scenario)


def test_a_pool_at_its_largest_size_has_no_room_to_roll() -> None:
    async def scenario(cluster: SimCluster) -> None:
        await asyncio.sleep(15.0)
        with pytest.raises(FailedPrecondition, match="has its largest size, 4: one instance more must fit"):
            await manager_of(cluster).roll(PD, 2)

    simulate(replace(WORLD, texts=4), scenario)
