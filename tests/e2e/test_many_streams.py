"""Many concurrent streams through processes whose engines sleep: none is lost, memory is bounded, and `/health` is answered.

`make soak` opens more of them.
"""

import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.client import probed
from tests.e2e.delayed import delayed
from triptych.cli.cluster import LocalCluster

pytestmark = [pytest.mark.extended, pytest.mark.timeout(500)]

STREAMS = 300
TOKENS = 32
STREAM_BYTES = 128 << 10
"""Most memory of one open stream in a process ..."""
SPARE_BYTES = 32 << 20
"""... beside what processes take for other reasons."""
HEALTH_S = 0.1
FEW = 2
"""Probes that may be slow however few there are: while 300 streams are opened at once. From 200 on it is one in a hundred."""


def together(folder: Path) -> dict[str, tuple[str, ...]]:
    """Engines that compute all streams together: with 2,000 a step takes 0.25 s."""
    options = delayed(folder, pass_s=0.01, step_s=0.002, sequence_s=0.000125, prefill_token_s=0.00001)
    return options | {"text": (*options["text"], "--max-sequences", "2048", "--token-budget", "65536")}


@asynccontextmanager
async def most_memory(cluster: LocalCluster) -> AsyncIterator[dict[str, int]]:
    """By process, the most bytes that it had more than at the beginning."""
    processes = {name: psutil.Process(pid) for name, pid in cluster.processes.items()}
    before = {name: process.memory_info().rss for name, process in processes.items()}
    most = dict.fromkeys(processes, 0)

    async def watch() -> None:
        while True:
            for name, process in processes.items():
                most[name] = max(most[name], process.memory_info().rss - before[name])
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        yield most
        watching.cancel()


async def test_concurrent_streams_are_all_answered_in_bounded_memory_while_health_is_answered(tmp_path: Path) -> None:
    await opened(STREAMS, tmp_path)


async def opened(streams: int, folder: Path) -> dict[str, Any]:
    """Opens so many at once; returns the figures. Raises AssertionError."""
    async with LocalCluster(roles="E:1,PD:1", options=together(folder)) as cluster:
        port = cluster.targets["gateway"].rpartition(":")[2]
        async with most_memory(cluster) as most, probed(cluster) as probes:
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.e2e.many_streams", port, str(streams), str(TOKENS)),
                stdout=asyncio.subprocess.PIPE,
            )
            said = json.loads((await client.communicate())[0])
    p99_s = statistics.quantiles(probes, n=100)[-1]
    assert said["whole"] == streams, said
    assert max(most.values()) < streams * STREAM_BYTES + SPARE_BYTES, most
    assert len(probes) >= 20
    slow = [probe_s for probe_s in probes if probe_s >= HEALTH_S]
    assert len(slow) <= max(FEW, len(probes) / 100), sorted(probes)[-5:]
    return {"streams": streams, "took_s": said["took_s"], "probes": len(probes), "p99_s": p99_s, "most_bytes": most}
