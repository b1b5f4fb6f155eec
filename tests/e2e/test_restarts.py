"""kill -9 of each kind of process: the cluster is whole again without a command, at the same addresses.

Once with engines that compute, and once with engines that sleep, which start sooner.
"""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import post, rest, text_of
from tests.e2e.delayed import delayed
from tests.e2e.reference import Question, answer
from triptych.cli.cluster import LocalCluster

HEALED_S = 300.0
QUESTION = Question("What digits are shown?", ("9_c",))


async def answered(client: httpx.AsyncClient) -> str:
    """The answer, once the cluster gives one again."""
    while True:
        try:
            response = await post(client, QUESTION.body())
            if response.status_code == httpx.codes.OK:
                return text_of(response)
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("autoscale", [pytest.param(False, marks=pytest.mark.extended), True])
async def test_each_kind_of_process_is_replaced_after_kill_9(tmp_path: Path, autoscale: bool) -> None:
    options = delayed(tmp_path) if autoscale else {}
    async with (
        LocalCluster(roles="E:1,PD:1", restart=True, autoscale=autoscale, options=options) as cluster,
        rest(cluster.url) as client,
    ):
        names, right = set(cluster.processes), await answered(client)
        assert autoscale or right == answer(QUESTION).text
        for name in ("encoder-1", "text-1", "pool-manager", "router", "gateway"):
            pid, target = cluster.processes[name], cluster.targets[name]
            cluster.kill(name)
            await cluster.next_exit()
            async with asyncio.timeout(HEALED_S):
                assert await answered(client) == right
                # Requests need no pool manager, so it may be back later.
                while cluster.processes.get(name, pid) == pid:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            assert cluster.targets[name] == target
        assert set(cluster.processes) == names
