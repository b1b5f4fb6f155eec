"""Prefill and decode in vLLM engines of their own: the answers of one engine, whoever is killed meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count

import pytest
import pytest_asyncio

from tests.contract.text_engine_kit import VLLM_ARGS
from tests.e2e.client import rest, stream
from tests.e2e.reference import answer, questions
from tests.e2e.test_continuations import stopped, timeline
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.chat import ChatRequest, Message, TextPart
from triptych.domain.generation import TokenChunk
from triptych.domain.sampling import SamplingParams
from triptych.rpc.stubs import RouterStub

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

DECODE = {"decode-1", "decode-2"}
TOKENS, BEGUN = 900, 20
"""Of an answer whose instance is killed once so many have come: as many as the model's 1,024 positions leave room for."""
TIMEOUT_S = 240.0
OTHERS = 2
_names = count()


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
        roles="E:1,P:1,D:2",
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
        tasks = [group.create_task(stream(served.router, f"roles-{i}", question)) for i, question in enumerate(asked)]
    for index, (task, question) in enumerate(zip(tasks, asked, strict=True)):
        assert task.result().token_ids == answer(question).token_ids, question
        told = await served.timeline(f"roles-{index}")
        assert (told["text_attempts"], told["prefill_instance"]) == (1, "prefill-1")
        assert told["text_instance"] in DECODE
        assert told["kv_pulled_tokens"] or told["kv_cached_tokens"]


async def test_an_answer_goes_on_when_its_decode_instance_is_killed(served: Served) -> None:
    name, whole = next_name(), await long_answer(served, next_name(), nothing)
    killed: list[str] = []

    async def kill(tokens: int) -> None:
        if tokens >= BEGUN and not killed:
            with stopped(served.cluster, DECODE):
                told = await served.timeline(name)
                assert told["outcome"] != "done", "it ended before it could be interrupted"
                killed.append(str(told["text_instance"]))
                served.cluster.kill(killed[0])

    assert await answers_beside_others(served, name, kill) == [whole] * (OTHERS + 1)
    told = await served.timeline(name)
    assert {told["text_instance"], *killed} == DECODE
    assert told["outcome"] == "done"


async def test_an_answer_goes_on_when_the_prefill_instance_is_killed_as_it_transfers_kv(served: Served) -> None:
    name, whole = next_name(), await long_answer(served, next_name(), nothing)
    killed: list[int] = []

    async def kill(tokens: int) -> None:
        if not killed:
            killed.append(tokens)
            served.cluster.kill("prefill-1")

    assert await long_answer(served, name, kill) == whole
    assert (await served.timeline(name))["outcome"] == "done"


def next_name() -> str:
    return f"long-{next(_names)}"


async def nothing(tokens: int) -> None:
    """The reference is an answer that nothing happens to."""


async def answers_beside_others(
    served: Served, name: str, on_tokens: Callable[[int], Awaitable[None]]
) -> list[tuple[int, ...]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(long_answer(served, name, on_tokens))]
        tasks += [group.create_task(long_answer(served, next_name(), nothing)) for _ in range(OTHERS)]
    return [task.result() for task in tasks]


async def long_answer(served: Served, name: str, on_tokens: Callable[[int], Awaitable[None]]) -> tuple[int, ...]:
    """Greedy. ``on_tokens`` gets the number of tokens so far, after each message."""
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    message = Message("user", (TextPart("Tell me about seven and three."),))
    token_ids: tuple[int, ...] = ()
    async with aclosing(
        served.router.chat(ChatRequest(name, MODEL_ID, (message,), sampling, timeout_s=TIMEOUT_S))
    ) as events:
        async for received in events:
            for event in received:
                if isinstance(event, TokenChunk):
                    token_ids += event.token_ids
            await on_tokens(len(token_ids))
    assert len(token_ids) == TOKENS
    return token_ids
