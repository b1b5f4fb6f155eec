"""Limits of batches that change while instances serve, by orders of a pool manager: no request fails, and every answer is right."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, play_while, simulate
from tests.simulation.workload import make_asks
from triptych.domain.instance import InstanceLimits
from triptych.errors import InvalidRequest
from triptych.services.pool_manager.service import PoolManagerService

ORDERS = 60


def _manager(cluster: SimCluster) -> PoolManagerService:
    (node,) = cluster.managers.values()
    return node.service


@pytest.mark.parametrize("seed", range(2))
def test_many_changes_under_load_cost_no_request(seed: int) -> None:
    asks = make_asks(seed, 150, images=(0, 3), rate_per_s=40.0)

    async def scenario(cluster: SimCluster) -> None:
        draw, manager = Random(seed), _manager(cluster)

        async def change() -> None:
            await asyncio.sleep(1.0)
            for _ in range(ORDERS):
                await asyncio.sleep(draw.choice((0.0, 0.01, 0.05)))
                await manager.set_limits("e0", InstanceLimits(max_batch_items=draw.randint(1, 8)))
                await manager.set_limits("t0", InstanceLimits(max_sequences=draw.randint(1, 32)))

        check_right(await play_while(cluster, asks, change()))
        await manager.set_limits("e0", InstanceLimits(max_batch_items=3))
        await manager.set_limits("t0", InstanceLimits(max_sequences=5))
        await asyncio.sleep(2.0)
        limits = cluster.processes["t0"].instance.load().limits
        assert (limits.limits.max_sequences, limits.by_hand, limits.fault) == (5, True, "")
        assert cluster.processes["e0"].instance.load().limits.limits == InstanceLimits(max_batch_items=3)
        with pytest.raises(InvalidRequest, match="e0 has no max_sequences"):
            await manager.set_limits("e0", InstanceLimits(max_sequences=5))

    simulate(replace(World(encoders=2, texts=2, managers=1), seed=seed), scenario)


def test_limits_by_hand_outlive_the_manager_that_ordered_them() -> None:
    async def scenario(cluster: SimCluster) -> None:
        await asyncio.sleep(1.0)
        await _manager(cluster).set_limits("t0", InstanceLimits(max_sequences=5))
        await asyncio.sleep(1.0)
        (node,) = cluster.managers.values()
        await node.kill()
        node.start()
        await asyncio.sleep(10.0)
        told = {
            member.registration.instance_id: member.load.limits
            for pool in (await _manager(cluster).status()).pools
            for member in pool.members
        }
        limits = told["t0"]
        assert limits is not None
        assert (limits.limits.max_sequences, limits.by_hand) == (5, True)

    simulate(World(managers=1), scenario)
