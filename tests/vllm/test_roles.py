"""Prefill and decode in vLLM engines of their own: the answers of one engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.contract.text_engine_kit import VLLM_ARGS
from tests.e2e.client import rest, stream
from tests.e2e.reference import answer, questions
from tests.e2e.test_continuations import timeline
from triptych.cli.cluster import LocalCluster
from triptych.rpc.stubs import RouterStub

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Served:
    cluster: LocalCluster
    router: RouterStub

    async def timeline(self, name: str) -> dict[str, object]:
        async with rest(self.cluster.url) as client:
            return await timeline(client, name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with LocalCluster(
        roles="E:1,P:1,D:1",
        options={"text": ("--engine", "vllm", "--vllm-args", VLLM_ARGS)},
        log_dir=tmp_path_factory.mktemp("logs"),
        restart=True,
    ) as cluster:
        router = RouterStub(cluster.router_target)
        yield Served(cluster, router)
        await router.close()


async def test_answers_are_those_of_one_engine(served: Served) -> None:
    asked = questions((0, 1, 2, 8), 6)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(served.router, f"roles-{i}", one)) for i, one in enumerate(asked)]
    for index, (task, question) in enumerate(zip(tasks, asked, strict=True)):
        assert task.result().token_ids == answer(question).token_ids, question
        told = await served.timeline(f"roles-{index}")
        assert (told["text_attempts"], told["prefill_instance"]) == (1, "prefill-1")
        assert told["text_instance"] == "decode-1"
        assert told["kv_pulled_tokens"] or told["kv_cached_tokens"]
