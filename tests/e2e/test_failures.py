"""Loss of processes: kill -9 of any process including the parent, and an orderly shutdown."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.client import post, rest, text_of
from tests.e2e.delayed import delayed
from tests.e2e.reference import Question, answer, questions
from triptych.cli.cluster import LocalCluster

CLEAR_ERROR_S = 30.0
"""Of 100 requests at once, on a machine that may have other work; their own timeout is 100 s."""
CHILDREN_END_S = 60.0
IDLE_S = 4.0
IDLE_CORE_SHARE = 0.1
"""A loop that spins takes all of a core; what reports and looks after leases takes a few hundredths."""
STARTED_BY_A_PARENT = """
import asyncio
import json
import sys
from triptych.cli.cluster import LocalCluster

async def main():
    async with LocalCluster(roles="E:1,PD:1", options=json.loads(sys.argv[1])) as cluster:
        print(*cluster.processes.values(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def ask_100(
    client: httpx.AsyncClient, group: asyncio.TaskGroup, finished_first: int
) -> list[tuple[Question, asyncio.Task[httpx.Response]]]:
    """100 requests at once; returns when the first few are answered and others still run.

    On a busy machine this process may see all answers at the same time: then it asks again.
    """
    asked: list[tuple[Question, asyncio.Task[httpx.Response]]] = []
    for _ in range(5):
        tasks = [(q, group.create_task(post(client, q.body()))) for q in questions((1, 2, 4, 8), 100)]
        asked += tasks
        pending = {task for _, task in tasks}
        while 100 - len(pending) < finished_first:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            return asked
    raise AssertionError("all requests have always ended already")


@pytest.mark.extended
async def test_a_killed_encoder_loses_no_answer_and_the_only_text_process_fails_each_request_clearly() -> None:
    """During 100 requests each. The second kill finds one encoder, which is enough."""
    loop = asyncio.get_running_loop()
    async with LocalCluster(roles="E:2,PD:1") as cluster, rest(cluster.url) as client:
        async with asyncio.TaskGroup() as group:
            asked = await ask_100(client, group, finished_first=5)
            cluster.kill("encoder-1")
        for question, task in asked:
            assert text_of(task.result()) == answer(question).text
        again = Question("What digits are shown?", ("9_c",))
        assert text_of(await post(client, again.body())) == answer(again).text
        async with asyncio.TaskGroup() as group:
            asked = await ask_100(client, group, finished_first=5)
            cluster.kill("text-1", signal.SIGSTOP)  # all may be answered by now; the next one is not
            last = Question("Hello!")
            asked.append((last, group.create_task(post(client, last.body()))))
            await asyncio.sleep(0.2)
            cluster.kill("text-1")
            killed_s = loop.time()
            await asyncio.wait([task for _, task in asked])
            took_s = loop.time() - killed_s
        assert took_s < CLEAR_ERROR_S
        failed = 0
        for question, task in asked:
            response = task.result()
            if response.status_code == 200:
                assert text_of(response) == answer(question).text
            else:
                failed += 1
                assert response.status_code == 503, response.text
                assert response.json()["error"]["message"]
        assert failed > 0
        refused = await post(client, Question("Hello!").body())
        assert refused.status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503


@pytest.mark.extended
async def test_an_idle_cluster_uses_no_cpu_and_an_orderly_shutdown_leaves_nothing() -> None:
    """No process, no port, no shared memory."""
    async with LocalCluster(roles="E:2,PD:1") as cluster:
        async with rest(cluster.url) as client:
            question = Question("What digits are shown?", ("9_c", "9_c"))
            assert text_of(await post(client, question.body())) == answer(question).text
        await asyncio.sleep(1)  # links and load reports settle
        before = _cpu_s(cluster)
        await asyncio.sleep(IDLE_S)
        used = {name: spent_s - before[name] for name, spent_s in _cpu_s(cluster).items()}
        pids, targets = dict(cluster.processes), dict(cluster.targets)
        shared = {path for pid in pids.values() for path in shared_memory_of(pid)}
        logs = cluster.log_dir
    assert max(used.values()) < IDLE_CORE_SHARE * IDLE_S, f"CPU seconds in {IDLE_S:g} s without work: {used}"
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]
    for target in targets.values():
        host, port = target.split(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0, f"something still listens at {target}"
    assert not [path for path in shared if path.exists()]
    assert not logs.exists()


def _cpu_s(cluster: LocalCluster) -> dict[str, float]:
    times = {name: psutil.Process(pid).cpu_times() for name, pid in cluster.processes.items()}
    return {name: spent.user + spent.system for name, spent in times.items()}


def test_a_parent_killed_with_sigkill_leaves_no_children(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTED_BY_A_PARENT, json.dumps(delayed(tmp_path))]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # noqa: TID251  # its logs stay
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            assert parent.stdout is not None
            children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
            assert len(children) == 5
        finally:
            parent.kill()
    _, alive = psutil.wait_procs(children, CHILDREN_END_S)
    assert not alive


def shared_memory_of(pid: int) -> set[Path]:
    """Named shared memory files that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line}  # noqa: S108  # it is looked at
    return {Path(path) for path in paths if not path.endswith("(deleted)")}
