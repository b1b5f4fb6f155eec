"""A request that ends each process whose engine begins it, among others, with the real processes of ``triptych up``."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.e2e.client import post, rest
from tests.e2e.delayed import delayed
from tests.e2e.reference import Question
from triptych.cli.cluster import Exit, LocalCluster

_OTHERS = 24
_POISON_TOKENS = 13
"""Of its answer, by which engines know the request that ends them."""
_HOOK = f"""
import os, sys
if any(argument.endswith("triptych.services.text") for argument in sys.orig_argv):
    from triptych.errors import InstanceLost
    from triptych.machine.text.counted_batch import CountedBatch
    start = CountedBatch._start

    def start_or_end(batch, sequence):
        started = start(batch, sequence)
        if sequence.limit == {_POISON_TOKENS}:
            if os.environ["POISON"] == "silent":
                os._exit(3)
            raise InstanceLost("the engine has failed: ValueError: no such head size") from ValueError("no such head size")
        return started

    CountedBatch._start = start_or_end
"""


@pytest.mark.parametrize("way", [pytest.param("silent", marks=pytest.mark.extended), "said"])
async def test_a_request_that_ends_processes_fails_alone_and_ends_two(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, logs = tmp_path / "hook", tmp_path / "logs"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(_HOOK)
    monkeypatch.setenv("PYTHONPATH", str(hook), prepend=os.pathsep)
    monkeypatch.setenv("POISON", way)
    question = Question("What digit?", ("3_a",))
    exits = list[Exit]()
    async with (
        LocalCluster(roles="E:1,PD:3", options=delayed(tmp_path, step_s=0.05), log_dir=logs, restart=True) as cluster,
        rest(cluster.url) as client,
        asyncio.TaskGroup() as group,
    ):

        async def watch() -> None:
            while True:
                exits.append(await cluster.next_exit())

        watching = group.create_task(watch())
        others = [group.create_task(post(client, question.body(max_tokens=20))) for _ in range(_OTHERS)]
        await asyncio.sleep(0.2)
        poison = await post(client, question.body(max_tokens=_POISON_TOKENS))
        answers = [await other for other in others]
        watching.cancel()
    assert poison.status_code == 500, poison.text
    assert poison.json()["error"]["code"] == "engine_failure"
    assert [answer.status_code for answer in answers] == [200] * _OTHERS
    told = "status 1: text/engine (ValueError: no such head size) has failed" if way == "said" else "status 3"
    assert [str(end) for end in exits] == [f"{end.name} ended with {told}" for end in exits]
    assert len(exits) == 2
    log = (logs / "router.log").read_text()
    (line,) = (line for line in log.splitlines() if "fails alone, lost with" in line)
    assert line.count("no such head size") == (2 if way == "said" else 0)


async def test_instances_have_answered_once_they_have_encoded_and_generated(tmp_path: Path) -> None:
    instances = ("encoder-1", "text-1")
    async with (
        LocalCluster(roles="E:1,PD:1", options=delayed(tmp_path), log_dir=tmp_path / "logs") as cluster,
        rest(cluster.url) as client,
    ):
        assert await cluster.answered(instances) == []
        answer = await post(client, Question("What digit?", ("3_a",)).body(max_tokens=2))
        assert answer.status_code == 200, answer.text
        assert await cluster.answered(instances) == list(instances)
