"""A cluster whose pool manager is stopped, killed, and asked to drain an instance, under load."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import load, stream
from tests.e2e.delayed import delayed
from tests.e2e.reference import Question
from triptych.cli.cluster import LocalCluster
from triptych.domain.pool import ManagerStatus, MemberCondition
from triptych.rpc.stubs import PoolManagerStub, RouterStub

pytestmark = pytest.mark.timeout(300)

TOKENS = 8
QUICK = ("--suspect-s", "3", "--remove-s", "6")


async def triptych(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "triptych.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


def members(status: ManagerStatus) -> dict[str, Any]:
    return {member.registration.instance_id: member for pool in status.pools for member in pool.members}


async def test_a_pool_manager_is_stopped_asked_to_drain_and_killed_and_no_answer_is_lost(
    tmp_path: Path,
) -> None:
    options = {**delayed(tmp_path), "pool_manager": QUICK}
    async with LocalCluster(roles="E:2,PD:1", options=options) as cluster:
        router, manager = RouterStub(cluster.router_target), PoolManagerStub(cluster.manager_target)
        assert members(await manager.status()).keys() == {"encoder-1", "encoder-2", "text-1", "router"}
        whole = (await stream(router, "whole", Question("What digits are shown?", ("9_c",), TOKENS))).text
        async with load(router, max_tokens=TOKENS, whole=whole):
            cluster.kill("pool-manager", signal.SIGSTOP)
            await asyncio.sleep(8)
            cluster.kill("pool-manager", signal.SIGCONT)
            await asyncio.sleep(2)
            found = members(await manager.status())
            assert {member.condition for member in found.values()} == {MemberCondition.ACTIVE}
            assert min(member.since_s for member in found.values()) > 8, "none was removed meanwhile"

            code, out = await triptych("drain", "encoder-2", "--pool-manager", cluster.manager_target)
            assert (code, "encoder-2" in out) == (0, True)
            async with asyncio.timeout(240):
                while members(await manager.status())["encoder-2"].condition is not MemberCondition.DRAINED:  # noqa: ASYNC110 - asked over gRPC
                    await asyncio.sleep(0.1)
            code, out = await triptych("drain", "encoder-9", "--pool-manager", cluster.manager_target)
            assert (code, "knows no member 'encoder-9'" in out) == (2, True)
            cluster.kill("encoder-2", signal.SIGTERM)
            async with asyncio.timeout(240):
                while "encoder-2" in members(await manager.status()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            shown = ("status", "--json", "--url", cluster.url, "--pool-manager", cluster.manager_target)
            code, out = await triptych(*shown)
            pools = {pool["role"]: pool["members"] for pool in json.loads(out)["pools"]}
            assert code == 0
            assert set(pools) == {"E", "PD", None}
            assert [member["instance_id"] for member in pools["E"]] == ["encoder-1"]

            cluster.kill("pool-manager")
            await asyncio.sleep(3)
            code, out = await triptych(*shown)
            assert (code, json.loads(out)["pools"]) == (0, None)
        await manager.close()
        await router.close()
