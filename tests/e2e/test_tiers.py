"""Tiers of hardware in a local cluster whose engines sleep: pools of their own, the cheapest grows first, the dearest shrinks first."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.client import stream
from tests.e2e.reference import questions
from triptych.cli.cluster import LocalCluster
from triptych.cli.placement import placed_kinds
from triptych.cli.service_options import SERVICES, parse
from triptych.cli.tiers import read_tiers, sleeping
from triptych.demo import MODEL_DIR
from triptych.domain.pool import ManagerStatus
from triptych.engine.delay import synthetic_profiles
from triptych.errors import TriptychError
from triptych.rpc.stubs import PoolManagerStub, RouterStub
from triptych.runtime.profiles import write_profile

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
ROLES = "E:1,PD@cheap:1,PD@dear:1"


def sizes(status: ManagerStatus) -> dict[str, int]:
    """Wanted instances by pool."""
    return {
        pool.scaling.name.partition("/")[2]: pool.scaling.wanted for pool in status.pools if pool.scaling is not None
    }


async def load(router: RouterStub, every_s: Callable[[], float]) -> None:
    """Requests all the time; none may fail."""
    async with asyncio.TaskGroup() as group:
        for number, question in enumerate(questions((1, 2), 100_000)):
            group.create_task(stream(router, f"r{number}", question))
            await asyncio.sleep(every_s())


async def seen(manager: PoolManagerStub, until: Callable[[dict[str, int]], bool]) -> list[dict[str, int]]:
    """The sizes over time, until one of them is as asked for."""
    history: list[dict[str, int]] = []
    async with asyncio.timeout(200):
        while not (history and until(history[-1])):
            try:
                now = sizes(await manager.status())
            except TriptychError:
                now = {}
            if now and (not history or history[-1] != now):
                history.append(now)
            await asyncio.sleep(0.2)
    return history


async def test_the_cheapest_tier_grows_first_and_the_dearest_shrinks_first_without_a_failed_request(
    tmp_path: Path,
) -> None:
    profiles = tmp_path / "profiles"
    for name, profile in zip(
        ("encoder", "decoder"),
        synthetic_profiles(MODEL_DIR, image_s=0.01, step_s=0.02, prompt_token_s=0.002, load_s=0.1, process_s=1.0),
        strict=True,
    ):
        write_profile(profiles / f"{name}.json", profile)
    given = parse(
        (
            f"--delay-profile={profiles}",
            "--slo=ttft=3s,tbt=1s",
            "--pool-sizes=E=1-1,PD@cheap=1-2,PD@dear=0-2",
            "--period-s=10",
            "--low-periods=1",
            "--attainment-window-s=10",
            "--growth-cooldown-s=1",
        )
    )
    kinds = placed_kinds(ROLES)
    tiers = read_tiers(kinds, ("cheap:device=old,price=1", "dear:device=new,price=8,speed=2"), ())
    tiers, options = sleeping(tiers, given, dict.fromkeys(SERVICES, ()), tmp_path / "tiers")
    every_s = 0.5
    async with LocalCluster(roles=ROLES, autoscale=True, options=options, tiers=tiers) as cluster:
        manager, router = PoolManagerStub(cluster.manager_target), RouterStub(cluster.router_target)
        begin = await seen(manager, lambda now: {"PD@cheap", "PD@dear"} <= now.keys())
        assert begin[-1]["PD@cheap"] == 1
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(load(router, lambda: every_s))
            await seen(manager, lambda now: now.get("PD@dear") == 0)
            every_s = 0.03
            rising = await seen(manager, lambda now: now.get("PD@dear", 0) >= 1)
            every_s = 2.0
            falling = await seen(manager, lambda now: now == {"E": 1, "PD@cheap": 1, "PD@dear": 0})
            loading.cancel()
        grown = next(now for now in rising if now["PD@dear"])
        assert grown["PD@cheap"] == 2, "the cheap tier was full before the dear one grew"
        assert all(now["PD@cheap"] == 2 or now["PD@dear"] == 0 for now in falling), falling
        await manager.close()
        await router.close()
