"""Each stage in instances of its own: the answers of one instance with all stages, whoever is killed or drains meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.e2e.client import post, rest, stream, timeline_of
from tests.e2e.reference import Question, answer, questions
from tests.e2e.test_answers import assert_no_stacks
from tests.e2e.test_continuations import SEEN, Streamed, stopped
from tests.e2e.test_continuations import stream as sampled
from tests.e2e.test_continuations import timeline as timeline_by_id
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.pool import ManualSize
from triptych.domain.stage import Role
from triptych.rpc.stubs import PoolManagerStub, RouterStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL, DECODE = {"prefill-1", "prefill-2"}, {"decode-1", "decode-2"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """With a spare of each that is killed. What was killed is started again."""
    logs = tmp_path_factory.mktemp("logs")
    options = {"text": ("--transfer-kv-on-drain",)}
    async with LocalCluster(roles="E:1,P:2,D:2", restart=True, options=options, log_dir=logs) as running:
        yield running
    assert_no_stacks(logs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: LocalCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with rest(cluster.url) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(http: httpx.AsyncClient) -> Streamed:
    """The two long answers that nothing happens to."""

    async def nothing(request_id: str, tokens: int) -> None: ...

    return await sampled(http, nothing)


async def test_answers_are_those_of_generate(cluster: LocalCluster, http: httpx.AsyncClient) -> None:
    router = RouterStub(cluster.router_target)
    asked = questions((0, 1, 2, 8), 6)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(router, f"roles-{i}", question)) for i, question in enumerate(asked)]
    await router.close()
    for index, (task, question) in enumerate(zip(tasks, asked, strict=True)):
        assert task.result().token_ids == answer(question).token_ids, question
        told = await timeline_by_id(http, f"roles-{index}")
        assert told["text_attempts"] == 1, "to transfer is no failure"
        assert told["prefill_instance"] in PREFILL
        assert told["text_instance"] in DECODE
        assert told["kv_pulled_tokens"] + told["kv_cached_tokens"] > 0


async def test_both_choices_of_a_request_go_on_at_the_decode_instance(http: httpx.AsyncClient) -> None:
    question = Question("What digits are shown?", ("3_a", "9_c"))
    response = await post(http, question.body(n=2))
    assert response.status_code == 200, response.text
    texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert texts == [answer(question).text] * 2
    told = await timeline_of(http, response)
    assert (told["prefill_instance"] in PREFILL, told["text_instance"] in DECODE) == (True, True)


@pytest.mark.parametrize("stage", [pytest.param("prefill_instance", marks=pytest.mark.extended), "text_instance"])
async def test_a_stream_goes_on_when_one_of_its_instances_is_killed(
    cluster: LocalCluster, http: httpx.AsyncClient, whole: Streamed, stage: str
) -> None:
    killed: dict[str, str] = {}

    async def kill(request_id: str, tokens: int) -> None:
        if tokens < SEEN or killed:
            return
        with stopped(cluster, PREFILL | DECODE):
            told = await timeline_by_id(http, request_id)
            killed[request_id] = told[stage] or told["text_instance"]
            cluster.kill(killed[request_id])

    got = await sampled(http, kill)
    assert_equal(got, whole)
    ((request_id, lost),) = killed.items()
    told = await timeline_by_id(http, request_id)
    assert told["outcome"] == "done"
    if stage == "text_instance":
        assert {told["text_instance"], lost} == DECODE
        assert told["continuations"] == 1


@pytest.mark.extended
async def test_a_decode_pool_that_shrinks_hands_its_answers_over(
    cluster: LocalCluster, http: httpx.AsyncClient, whole: Streamed
) -> None:
    manager = PoolManagerStub(cluster.manager_target)
    begun: set[str] = set()
    ordered: list[str] = []

    async def shrink(request_id: str, tokens: int) -> None:
        begun.add(request_id)
        if not ordered:  # at once: the answers are to run for a while after the instance has been told
            ordered.append(request_id)
            await manager.set_size(ManualSize(MODEL_ID, Role.D, 1, 600.0))

    async def note(request_id: str, tokens: int) -> None:
        begun.add(request_id)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sampled(http, called)) for called in (shrink, note, note)]
    await manager.close()
    for task in tasks:
        assert_equal(task.result(), whole)
    async with asyncio.timeout(240):
        while True:
            if len(left := DECODE & cluster.processes.keys()) == 1:
                break
            await asyncio.sleep(0.1)
    told = [await timeline_by_id(http, request_id) for request_id in begun]
    assert {timeline["text_instance"] for timeline in told} == left, (
        "what ran at the instance that drained goes on at the other"
    )
    assert not any(timeline["continuations"] for timeline in told), "no answer was lost with its instance"


@pytest.mark.extended
async def test_instances_with_prefill_or_decode_may_encode_as_well(tmp_path: Path) -> None:
    asked = questions((0, 1, 8), 3)
    async with LocalCluster(roles="EP:1,ED:1", log_dir=tmp_path / "logs") as cluster, rest(cluster.url) as client:
        router = RouterStub(cluster.router_target)
        for index, question in enumerate(asked):
            got = await stream(router, f"pair-{index}", question)
            assert got.token_ids == answer(question).token_ids, question
            told = await timeline_by_id(client, f"pair-{index}")
            assert (told["prefill_instance"], told["text_instance"]) == ("encode-prefill-1", "encode-decode-1")
        await router.close()
    assert_no_stacks(tmp_path / "logs")


def assert_equal(got: Streamed, whole: Streamed) -> None:
    assert (got.texts, got.reasons, got.usage) == (whole.texts, whole.reasons, whole.usage)
    for choice, tokens in whole.tokens.items():
        assert [token for token, _ in got.tokens[choice]] == [token for token, _ in tokens]
