"""Media built to be expensive is refused by its header, or its decoding ends with its request; other requests are
unaffected.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from tests.e2e.client import post, rest, text_of
from tests.e2e.reference import DIGITS, Question, answer, data_url
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.testing.hostile import chunk, jpeg_of_many_scans, with_chunks

pytestmark = [pytest.mark.extended, pytest.mark.asyncio(loop_scope="module")]

MAX_SCANNED_PIXELS = 10**12
SOON_S = 60.0
GIVEN_S = 3.0
"""Time that a request whose image takes minutes gives itself."""
MAX_BUSY_CORES = 0.5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    options = {"router": ("--max-scanned-pixels", str(MAX_SCANNED_PIXELS))}
    async with LocalCluster(roles="E:2,PD:1", options=options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: LocalCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with rest(cluster.url) as client:
        yield client


def hostile(scans: int) -> dict[str, Any]:
    """A request with a JPEG of 64 million pixels; each scan has 10 bytes and costs about 10 ms of CPU."""
    return asking(data_url(jpeg_of_many_scans(8000, 8000, scans=scans), "image/jpeg"))


def asking(url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return {"model": MODEL_ID, "messages": [{"role": "user", "content": content}], "max_tokens": 4}


async def test_metadata_that_cannot_be_read_changes_no_answer(http: httpx.AsyncClient) -> None:
    plain = (DIGITS / "3_a.png").read_bytes()
    odd = with_chunks(plain, chunk(b"eXIf", b"\1") + chunk(b"gAMA", b""))
    answers = [text_of(await post(http, asking(data_url(media, "image/png")))) for media in (plain, odd)]
    assert answers[0] == answers[1]


def ordinary(number: int) -> Question:
    return Question("Which digit is this?", (f"{number}_b",))


async def asked(client: httpx.AsyncClient, question: Question) -> None:
    assert text_of(await post(client, question.body())) == answer(question).text


async def test_an_image_with_very_many_scans_is_refused_and_others_are_answered(http: httpx.AsyncClient) -> None:
    beyond = hostile(MAX_SCANNED_PIXELS // 64_000_000 + 100)
    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as group:
        refused = [group.create_task(post(http, beyond)) for _ in range(8)]
        for number in range(4):
            group.create_task(asked(http, ordinary(number)))
    for task in refused:
        response = task.result()
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "invalid_media"
        assert f"the limit is {MAX_SCANNED_PIXELS}" in response.json()["error"]["message"]


async def test_decodes_end_with_their_requests_and_encoders_keep_serving(
    cluster: LocalCluster, http: httpx.AsyncClient
) -> None:
    """At least as many as both encoders have preprocessing threads."""
    number = 2 * (psutil.cpu_count() or 1) + 2
    slow = [hostile(10_000 + index) for index in range(number)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(http.post("/v1/chat/completions", json=body, headers={"x-request-timeout": str(GIVEN_S)}))
            for body in slow
        ]
    assert {task.result().status_code for task in tasks} == {504}
    async with asyncio.timeout(SOON_S):
        while await _busy_cores(cluster) > MAX_BUSY_CORES:
            pass
    async with asyncio.timeout(SOON_S):
        await asked(http, ordinary(5))


async def _busy_cores(cluster: LocalCluster) -> float:
    """CPU cores used by the encoders and their children, over a second."""
    before_s, started_s = _cpu_s(cluster), time.perf_counter()
    await asyncio.sleep(1.0)
    return (_cpu_s(cluster) - before_s) / (time.perf_counter() - started_s)


def _cpu_s(cluster: LocalCluster) -> float:
    spent_s = 0.0
    for name, pid in cluster.processes.items():
        if name.startswith("encoder"):
            encoder = psutil.Process(pid)
            for process in (encoder, *encoder.children(recursive=True)):
                times = process.cpu_times()
                spent_s += times.user + times.system
    return spent_s
