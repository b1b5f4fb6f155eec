"""Hybrid instances, alone and among others: the same answers as separate instances, without transfers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.client import post, rest, stream, text_of, timeline_of
from tests.e2e.reference import Question, answer
from triptych.cli.cluster import LocalCluster
from triptych.rpc.stubs import RouterStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

IMAGES = [
    Question("What digits are shown?", tuple(f"{digit}_{kind}" for digit in digits))
    for kind in "abc"
    for digits in ((3,), (0, 7), (1, 2, 8))
]
TEXTS = [Question(text) for text in ("Hello!", "Who are you?", "What digits are shown?", "Which is the largest digit?")]
OBJECTIVE = ("--tpot-slo-s", "0.05", "--max-sequences", "8")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    logs = tmp_path_factory.mktemp("logs")
    async with LocalCluster(roles="EPD:1", options={"text": OBJECTIVE}, log_dir=logs) as running:
        yield running
    written = (logs / "hybrid-1.log").read_text()
    assert "Traceback" not in written
    assert "tokens between two decode steps" in written
    assert "text is down" in written, "it shut down in order"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: LocalCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with rest(cluster.url) as client:
        yield client


async def families(cluster: LocalCluster, client: httpx.AsyncClient) -> dict[str, float]:
    """The instance's metrics; each family appears once."""
    told = (await client.get(f"{cluster.admin_urls['hybrid-1']}/metrics")).text
    found = list(text_string_to_metric_families(told))
    assert len({family.name for family in found}) == len(found)
    return {f"{s.name}{sorted(s.labels.items())}": s.value for family in found for s in family.samples}


async def test_one_hybrid_process_answers_mixed_requests_as_generate_does(
    cluster: LocalCluster, http: httpx.AsyncClient
) -> None:
    assert list(cluster.processes) == ["pool-manager", "hybrid-1", "router", "gateway"]
    router = RouterStub(cluster.router_target)
    asked = [*IMAGES, *TEXTS, *TEXTS]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(router, f"mixed-{i}", question)) for i, question in enumerate(asked)]
    await router.close()
    for question, task in zip(asked, tasks, strict=True):
        assert task.result().token_ids == answer(question).token_ids, question
        assert task.result().text == answer(question).text
    ready = (await http.get("/ready")).json()
    assert (ready["ready"], ready["instances"]) == (True, ["hybrid-1: ready"])


async def test_its_own_embeddings_are_read_from_memory_and_released(
    cluster: LocalCluster, http: httpx.AsyncClient
) -> None:
    question = Question("Read the digits in order.", ("4_a", "9_b"))
    response = await post(http, question.body())
    assert text_of(response) == answer(question).text
    timeline = await timeline_of(http, response)
    assert {item["encoder"] for item in timeline["items"]} == {timeline["text_instance"]} == {"hybrid-1"}
    assert {item["pull_backend"] for item in timeline["items"]} == {"memory"}
    async with asyncio.timeout(240):
        while (got := await families(cluster, http))["triptych_arena_leases[]"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    assert got["triptych_connections[('backend', 'memory')]"] == 1
    assert not [name for name in got if name.startswith("triptych_transfer_bytes") and "memory" not in name]
    for arena in ("encoder", "text"):
        assert got[f"triptych_arena_embeddings[('arena', '{arena}')]"] >= 2
        assert got[f"triptych_arena_leased_bytes[('arena', '{arena}')]"] == 0


@pytest.mark.extended
async def test_with_two_threads_its_stages_compute_at_the_same_time_and_give_the_same_answers(tmp_path: Path) -> None:
    async with LocalCluster(roles="EPD:1", threads=2, log_dir=tmp_path) as cluster, rest(cluster.url) as client:
        asked = [*IMAGES, *TEXTS] * 2
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(post(client, question.body())) for question in asked]
        for question, task in zip(asked, tasks, strict=True):
            assert text_of(task.result()) == answer(question).text
        timeline = await timeline_of(client, tasks[0].result())
        assert {item["pull_backend"] for item in timeline["items"]} == {"memory"}
    written = (tmp_path / "hybrid-1.log").read_text()
    assert "encoder and text engine compute at the same time, in 2 threads" in written
    assert "Traceback" not in written


@pytest.mark.extended
async def test_hybrid_and_other_processes_work_together_and_one_may_die() -> None:
    async with LocalCluster(roles="E:1,PD:1,EPD:2") as cluster, rest(cluster.url) as client:
        asked = [*IMAGES, *TEXTS] * 2
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(post(client, question.body())) for question in asked]
        for question, task in zip(asked, tasks, strict=True):
            assert text_of(task.result()) == answer(question).text
        timelines = [await timeline_of(client, task.result()) for task in tasks]
        assert {timeline["text_instance"] for timeline in timelines} == {"text-1", "hybrid-1", "hybrid-2"}
        encoders = {item["encoder"] for timeline in timelines for item in timeline["items"]}
        assert encoders == {"encoder-1", "hybrid-1", "hybrid-2"}
        cluster.kill("hybrid-1")
        assert cluster.consequence(await cluster.next_exit()) == ""
        new = Question("What digits are shown?", ("5_a", "6_b"))
        assert text_of(await post(client, new.body())) == answer(new).text
