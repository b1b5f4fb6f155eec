"""A text instance whose vLLM has two worker processes, in whole clusters on the CPU."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.e2e.client import rest, stream_message
from tests.integration.families.harness import items_of, message_of
from tests.vllm.models import KINDS, MODELS
from tests.vllm.reference import MAX_TOKENS, Known, Reference
from triptych.cli.cluster import LocalCluster
from triptych.errors import TriptychError
from triptych.rpc.stubs import InstanceStub, RouterStub

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

ARGUMENTS = f"--tensor-parallel-size 2 --enforce-eager --kv-cache-memory-bytes {64 << 20} --block-size 32"
MODEL_ID = "served"
TEXT = "text-1"
WORKERS = 2
START_S = 300.0
END_S = 120.0
CONCURRENT = 8


@dataclass
class Served:
    """A model behind a cluster, and beside it vLLM alone, with one worker."""

    cluster: LocalCluster
    router: RouterStub
    reference: Reference
    _names: Iterator[int] = field(default_factory=count)

    async def tokens(self, known: Known) -> tuple[int, ...]:
        message = message_of(known.question)
        name = f"r{next(self._names)}"
        return (await stream_message(self.router, name, MODEL_ID, message, MAX_TOKENS)).token_ids

    async def pulls(self) -> float:
        """How many embeddings the text instance has pulled."""
        async with rest(self.cluster.admin_urls[TEXT]) as client:
            text = (await client.get("/metrics")).text
        found = re.findall(r"^triptych_transfer_seconds_count\S* (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in found)

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.cluster.processes[TEXT]).children(recursive=True)
        return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]

    async def served_again(self) -> None:
        """Wait until the text instance has been started again and answers."""
        known = self.reference.known("text", 0)
        async with asyncio.timeout(START_S):
            while True:
                if await self.cluster.serves([TEXT]):
                    try:
                        assert await self.tokens(known) == known.token_ids
                    except TriptychError:
                        pass  # the router has not heard of it
                    else:
                        return
                await asyncio.sleep(0.2)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["demo", "qwen3_vl"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    model = MODELS[request.param]
    directory = model.make(tmp_path_factory.mktemp(model.name))
    reference = Reference(model, directory, tmp_path_factory.mktemp("reference") / "log")
    try:
        async with LocalCluster(
            f"{MODEL_ID}={directory}",
            options={"text": ("--engine", "vllm", "--vllm-args", ARGUMENTS)},
            log_dir=tmp_path_factory.mktemp("logs"),
            restart=True,
        ) as cluster:
            router = RouterStub(cluster.router_target)
            made = Served(cluster, router, reference)
            yield made
            last = made.workers()
            await router.close()
        await all_end(last)
    finally:
        reference.close()


async def all_end(processes: list[psutil.Process]) -> None:
    """Wait until these processes end by themselves."""
    assert processes
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, END_S)
    assert not alive


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_equal_those_of_one_worker(served: Served, kind: str) -> None:
    known = served.reference.known(kind, 0)
    assert await served.tokens(known) == known.token_ids
    assert len(served.workers()) == WORKERS


async def test_the_instance_tells_its_degree(served: Served) -> None:
    stub = InstanceStub(served.cluster.targets[TEXT])
    (part,) = (await stub.describe()).parts
    await stub.close()
    assert part.identity.tensor_parallel == WORKERS


async def test_an_item_is_pulled_once_for_all_workers(served: Served) -> None:
    known = [served.reference.known("two", 60 + number) for number in range(CONCURRENT)]
    before = await served.pulls()
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(served.tokens(example)) for example in known]
    assert [task.result() for task in asked] == [example.token_ids for example in known]
    different = {item.media for example in known for item in items_of(example.question)}
    assert await served.pulls() - before == len(different)


async def test_without_a_worker_the_instance_ends_and_is_started_again(served: Served) -> None:
    workers, pid = served.workers(), served.cluster.processes[TEXT]
    workers[1].kill()
    async with asyncio.timeout(END_S):
        assert (await served.cluster.next_exit()).plan.name == TEXT
    await all_end(workers)
    await served.served_again()
    assert served.cluster.processes[TEXT] != pid


async def test_a_worker_killed_under_load_fails_no_request_silently(served: Served) -> None:
    known = [served.reference.known("two", 80 + number) for number in range(CONCURRENT)]
    workers = served.workers()
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(outcome(served, example)) for example in known * 4]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        workers[0].kill()
    results: list[Any] = [task.result() for task in asked]
    for example, result in zip(known * 4, results, strict=True):
        assert isinstance(result, TriptychError) or result == example.token_ids
    async with asyncio.timeout(END_S):
        assert (await served.cluster.next_exit()).plan.name == TEXT
    await all_end(workers)
    await served.served_again()


async def outcome(served: Served, known: Known) -> tuple[int, ...] | TriptychError:
    try:
        return await served.tokens(known)
    except TriptychError as error:
        return error


async def test_workers_end_with_an_instance_that_is_killed(served: Served) -> None:
    workers = served.workers()
    served.cluster.kill(TEXT, signal.SIGKILL)
    await all_end(workers)
    await served.served_again()
