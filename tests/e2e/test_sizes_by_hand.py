"""A local cluster whose pool manager orders sizes, under load: no request fails when a pool grows, shrinks, or loses processes."""

import asyncio

import pytest

from tests.e2e.client import load
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.decision import Acting, ScalingStatus
from triptych.domain.pool import ManualSize, PoolStatus
from triptych.domain.stage import Role
from triptych.errors import TriptychError, Unavailable
from triptych.rpc.stubs import PoolManagerStub, RouterStub

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


PATIENT = {"router": ("--slo", "ttft=600s,tbt=600s")}
"""No objective is missed, so that sizes are those set by hand."""


class Manager:
    """What it says of the encoders."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.stub = PoolManagerStub(cluster.manager_target)

    async def pool(self) -> PoolStatus | None:
        """None while the manager is away or knows of no encoders."""
        try:
            pools = (await self.stub.status()).pools
        except TriptychError:
            return None
        return next((pool for pool in pools if pool.role is Role.E), None)

    async def set_size(self, size: int | None) -> None:
        """Once it leads."""
        async with asyncio.timeout(240):
            while True:
                try:
                    return await self.stub.set_size(ManualSize(MODEL_ID, Role.E, size, 0.0 if size is None else 600.0))
                except Unavailable:
                    await asyncio.sleep(0.2)

    async def until_ready(self, number: int) -> ScalingStatus:
        """Wait until so many encoders are ready."""
        async with asyncio.timeout(240):
            while True:
                pool = await self.pool()
                if pool is not None and pool.scaling is not None and pool.scaling.ready == number:
                    return pool.scaling
                await asyncio.sleep(0.1)


def encoders(cluster: LocalCluster) -> set[str]:
    return {name for name in cluster.processes if name.startswith("encoder")}


async def test_a_pool_grows_and_shrinks_by_hand_and_survives_kill_9_without_a_failed_request() -> None:
    async with LocalCluster(roles="E:1,PD:1", autoscale=True, options=PATIENT) as cluster:
        router, manager = RouterStub(cluster.router_target), Manager(cluster)
        await manager.until_ready(1)
        async with load(router):
            await manager.set_size(2)
            grown = await manager.until_ready(2)
            assert (grown.wanted, grown.acting) == (2, Acting.ALL)
            assert encoders(cluster) == {"encoder-1", "encoder-2"}

            incarnation, pid = (await manager.stub.status()).incarnation, cluster.processes["pool-manager"]
            cluster.kill("pool-manager")
            async with asyncio.timeout(240):
                while cluster.processes.get("pool-manager", pid) == pid:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
            again = await manager.until_ready(2)
            assert (await manager.stub.status()).incarnation != incarnation
            assert again.wanted == 2, "the scaler knows what is wanted"

            cluster.kill("encoder-2")
            await manager.until_ready(1)
            await manager.until_ready(2)
            assert encoders(cluster) == {"encoder-1", "encoder-2"}

            await manager.set_size(1)
            async with asyncio.timeout(240):
                while len(encoders(cluster)) != 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert (await manager.until_ready(1)).wanted == 1
        await manager.stub.close()
        await router.close()
