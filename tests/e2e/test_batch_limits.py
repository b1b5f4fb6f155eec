"""Limits of batches that change on running processes, by hand and by profiles: no request fails, and answers stay the same."""

import asyncio
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.e2e.client import load, stream
from tests.e2e.reference import questions
from triptych.cli import pools
from triptych.cli.cluster import LocalCluster
from triptych.cli.managers import Managers
from triptych.demo import MODEL_DIR
from triptych.domain.instance import InstanceLimits, LimitsReport
from triptych.domain.pool import ManagerStatus
from triptych.engine.delay import synthetic_profiles
from triptych.errors import TriptychError
from triptych.rpc.stubs import PoolManagerStub, RouterStub
from triptych.runtime.profiles import write_profile

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


def limits_of(status: ManagerStatus) -> dict[str, LimitsReport | None]:
    return {member.registration.instance_id: member.load.limits for pool in status.pools for member in pool.members}


async def until(manager: PoolManagerStub, holds: Callable[[ManagerStatus], bool]) -> ManagerStatus:
    async with asyncio.timeout(120):
        while True:
            try:
                status = await manager.status()
            except TriptychError:
                status = None
            if status is not None and holds(status):
                return status
            await asyncio.sleep(0.2)


async def _send(router: RouterStub) -> None:
    """Requests all the time; none may fail."""
    async with asyncio.TaskGroup() as group:
        for number, question in enumerate(questions((1, 2), 10_000)):
            group.create_task(stream(router, f"r{number}", question))
            await asyncio.sleep(0.5)


async def test_limits_by_hand_are_in_use_without_a_failed_request_and_after_the_end_of_the_process() -> None:
    async with LocalCluster(roles="E:1,PD:1", restart=True) as cluster:
        manager, router = PoolManagerStub(cluster.manager_target), RouterStub(cluster.router_target)
        await until(manager, lambda status: {"encoder-1", "text-1"} <= limits_of(status).keys())
        by_hand = Managers("", cluster.manager_target)
        shown = Console(file=io.StringIO())
        async with load(router):
            for most in (1, 4, 64, 2):
                await pools.limit("text", InstanceLimits(max_sequences=most), by_hand, shown, wait_s=30.0)
                await pools.limit("encoder-1", InstanceLimits(max_batch_items=most), by_hand, shown, wait_s=30.0)
                await asyncio.sleep(0.5)
            limits = limits_of(await manager.status())["text-1"]
            assert limits is not None
            assert (limits.limits.max_sequences, limits.by_hand) == (2, True)
        cluster.kill("text-1")

        def is_back(status: ManagerStatus) -> bool:
            told = limits_of(status).get("text-1")
            return told is not None and told.version == 1 and told.limits.max_sequences == 2

        await until(manager, is_back)
        await manager.close()
        await router.close()


async def test_the_manager_sets_limits_that_profiles_find_better_and_says_why(tmp_path: Path) -> None:
    """Engines that sleep: a step takes hardly longer with more sequences, and begins with room for one."""
    profiles = tmp_path / "profiles"
    encoder, decoder = synthetic_profiles(MODEL_DIR, image_s=0.02, step_s=0.005, load_s=0.1, process_s=1.0)
    write_profile(profiles / "encoder.json", encoder)
    write_profile(profiles / "decoder.json", decoder)
    options = {
        "encoder": (f"--delay-profile={profiles}",),
        "text": (f"--delay-profile={profiles}", "--max-sequences=1"),
        "router": (f"--profiles={profiles}", "--slo=ttft=20s,tbt=5s"),
        "pool_manager": (f"--profiles={profiles}", "--pool-sizes=E=1-1,PD=1-1"),
    }
    async with LocalCluster(roles="E:1,PD:1", autoscale=True, options=options) as cluster:
        manager, router = PoolManagerStub(cluster.manager_target), RouterStub(cluster.router_target)
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(_send(router))

            def is_set(status: ManagerStatus) -> bool:
                told = limits_of(status).get("text-1")
                return told is not None and (told.limits.max_sequences or 0) > 1

            status = await until(manager, is_set)
            sending.cancel()
        limits = limits_of(status)["text-1"]
        assert limits is not None
        assert not limits.by_hand
        reasons = [
            reason.text
            for pool in status.pools
            if pool.scaling is not None
            for decision in pool.scaling.decisions
            for reason in decision.reasons
        ]
        wanted = r"max_sequences \d+ on 1 of 1 instances: batches of up to \d+ instead of 1 bear \d+% more"
        assert any(re.match(wanted, text) for text in reasons), reasons
        await manager.close()
        await router.close()
