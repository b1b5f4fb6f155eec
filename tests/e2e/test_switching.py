"""A text instance switches between roles while it answers: no stream notices."""

import asyncio
import re
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import rest
from tests.e2e.test_answers import assert_no_stacks
from tests.e2e.test_continuations import TOKENS, Streamed, stream, timeline
from triptych.cli.cluster import LocalCluster
from triptych.domain.stage import Role
from triptych.errors import FailedPrecondition
from triptych.rpc.stubs import PoolManagerStub

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

STREAMS = 30
ROLES = (Role.P, Role.D, Role.PD)


async def test_an_instance_serves_one_role_after_another_while_streams_run(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    switchable = {"text": ("--switchable", "PD")}
    async with LocalCluster(roles="E:1,P:1,D:1,PD:1", options=switchable, log_dir=logs) as cluster:
        manager = PoolManagerStub(cluster.manager_target)
        async with rest(cluster.url) as client:
            whole = await stream(client, _nothing)
            got, ids = await streams_while_it_switches(client, manager)
            told = [await timeline(client, one) for one in ids]
        await manager.switch_instance("prefill-1", Role.D, force=False)
        with pytest.raises(FailedPrecondition, match="text-1 is the last prefill instance"):
            await manager.switch_instance("text-1", Role.D, force=False)
        await manager.close()
    assert_no_stacks(logs)
    for one in got:
        assert (one.texts, one.reasons, one.usage) == (whole.texts, whole.reasons, whole.usage)
    assert {one["outcome"] for one in told} == {"done"}
    assert any(one["prefill_instance"] == "text-1" for one in told), "it handed answers over"
    took_s = [float(one) for one in re.findall(r"has switched within ([\d.]+) s", _log_of(logs, "text-1"))]
    assert len(took_s) == len(ROLES)
    sys.stdout.write(f"switches took {', '.join(f'{one:.3f}' for one in took_s)} s\n")


async def streams_while_it_switches(
    client: httpx.AsyncClient, manager: PoolManagerStub
) -> tuple[list[Streamed], list[str]]:
    """The answers of all streams, and their ids."""
    ids = set[str]()
    begun = asyncio.Event()

    async def seen(request_id: str, tokens: int) -> None:
        ids.add(request_id)
        if tokens >= TOKENS // 10:
            begun.set()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(client, seen)) for _ in range(STREAMS)]
        await begun.wait()
        for role in ROLES:
            await manager.switch_instance("text-1", role, force=False)
            async with asyncio.timeout(60):
                while True:
                    if await _serves(manager, role):
                        break
                    await asyncio.sleep(0.1)
    return [task.result() for task in tasks], sorted(ids)


async def _serves(manager: PoolManagerStub, role: Role) -> bool:
    members = [one for pool in (await manager.status()).pools for one in pool.members]
    return any(one.registration.instance_id == "text-1" and one.open == role.stages for one in members)


async def _nothing(request_id: str, tokens: int) -> None: ...


def _log_of(logs: Path, name: str) -> str:
    return "".join(path.read_text() for path in logs.iterdir() if path.name.startswith(name))
