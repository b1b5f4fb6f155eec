"""A pool manager whose scaler is Kubernetes."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.kubernetes_kit import ApiServer, api_server, namespace
from triptych.domain.decision import ScalingStatus
from triptych.domain.pool import ManualSize
from triptych.domain.stage import Role
from triptych.rpc.stubs import PoolManagerStub
from triptych.services.pool_manager.app import app
from triptych.services.pool_manager.limits import ControlLimits
from triptych.services.pool_manager.settings import PoolManagerSettings

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    with api_server(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


async def scaling_when(manager: PoolManagerStub, holds: Callable[[ScalingStatus], bool]) -> ScalingStatus:
    """The only pool's status, once it is so."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = [pool.scaling for pool in (await manager.status()).pools]
            if found and found[0] is not None and holds(found[0]):
                return found[0]
            await asyncio.sleep(0.1)


async def test_a_manager_scales_a_deployment_and_shows_what_kubernetes_denies(
    kubernetes: tuple[str, Path], tmp_path: Path
) -> None:
    server = ApiServer(*kubernetes)
    async with server.admin, namespace(server, tmp_path, ("triptych-encoder",)) as (controllers, access):
        settings = PoolManagerSettings(
            port=0,
            scaler="kubernetes",
            kubernetes=access,
            deployments=("m/E=triptych-encoder",),
            control=ControlLimits(adopt_s=0.0),
            drain_s=0.0,
        )
        async with app(settings) as running:
            manager = PoolManagerStub(f"127.0.0.1:{running.port}")
            assert (await scaling_when(manager, lambda pool: pool.starting == 1)).wanted == 1
            await manager.set_size(ManualSize("m", Role.E, 3, 600.0))
            async with asyncio.timeout(LIMIT_S):
                while len(controllers.alive) < 3:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
            shown = await scaling_when(manager, lambda pool: pool.starting == 3)
            assert (shown.wanted, shown.fault) == (3, "")
            role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{access.kubernetes_namespace}/roles/triptych-scaling"
            await server.request("PATCH", role, {"rules": []}, kind="application/merge-patch+json")
            await manager.set_size(ManualSize("m", Role.E, 4, 600.0))
            await scaling_when(manager, lambda pool: "lacks a right" in pool.fault)
            await manager.close()
            await running.drain()
