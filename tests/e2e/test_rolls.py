"""A local cluster whose text instances get another tensor-parallel degree one by one: no request fails."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.e2e.client import stream
from tests.e2e.reference import questions
from triptych.cli import pools
from triptych.cli.cluster import LocalCluster
from triptych.cli.managers import Managers
from triptych.cli.outcome import CliError
from triptych.demo import MODEL_DIR
from triptych.engine.delay import synthetic_profiles
from triptych.rpc.stubs import PoolManagerStub, RouterStub
from triptych.runtime.profiles import write_profile

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
PATIENT = {"router": ("--slo", "ttft=600s,tbt=600s")}


async def load(router: RouterStub) -> None:
    """Requests all the time; none may fail."""
    async with asyncio.TaskGroup() as group:
        for number, question in enumerate(questions((1, 2), 10_000)):
            group.create_task(stream(router, f"r{number}", question))
            await asyncio.sleep(0.1)


async def test_a_pool_rolls_to_another_degree_without_a_failed_request_and_keeps_its_size(tmp_path: Path) -> None:
    encoder, decoder = synthetic_profiles(MODEL_DIR, image_s=0.01, step_s=0.02, load_s=0.1, process_s=1.0)
    write_profile(tmp_path / "encoder.json", encoder)
    for degree in (1, 2):
        of_degree = replace(decoder, identity=replace(decoder.identity, tensor_parallel=degree))
        write_profile(tmp_path / f"decoder-{degree}.json", of_degree)
    delayed = (f"--delay-profile={tmp_path}",)
    options = {**PATIENT, "encoder": delayed, "text": delayed}
    async with LocalCluster(roles="E:1,PD:2", restart=True, options=options) as cluster:
        manager, router = PoolManagerStub(cluster.manager_target), RouterStub(cluster.router_target)
        managers, out = Managers("", cluster.manager_target), io.StringIO()
        console = Console(file=out, width=200)
        await asyncio.sleep(12)  # the pools are taken on
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(load(router))
            await pools.roll("text", 2, managers, console, wait_s=200.0)
            loading.cancel()
        assert out.getvalue().splitlines()[-1].endswith("have degree 2")
        (pool,) = [pool for pool in (await manager.status()).pools if pool.role is not None and pool.role.value == "PD"]
        found = [member.registration.parts[0].identity.tensor_parallel for member in pool.members]
        assert found == [2, 2]
        async with asyncio.timeout(60):  # a process ends after it has left the pool
            while {name for name in cluster.processes if name.startswith("text")} != {"text-3", "text-4"}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        with pytest.raises(CliError, match="aborted"):
            await pools.roll("text", 4, managers, console, wait_s=200.0)
        (pool,) = [pool for pool in (await manager.status()).pools if pool.role is not None and pool.role.value == "PD"]
        assert [member.registration.parts[0].identity.tensor_parallel for member in pool.members] == [2, 2]
        await manager.close()
        await router.close()


async def test_an_engine_that_runs_on_one_device_is_refused_before_anything_starts() -> None:
    async with LocalCluster(roles="E:1,PD:1", restart=True) as cluster:
        await asyncio.sleep(12)
        console = Console(file=io.StringIO())
        with pytest.raises(CliError, match="tensor_parallel is 2, but engine triptych runs on one device"):
            await pools.roll("text", 2, Managers("", cluster.manager_target), console)
        assert set(cluster.processes) >= {"encoder-1", "text-1"}
