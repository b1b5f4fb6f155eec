"""The SDK against a cluster of real processes: its examples, answers, cancellation, loss of a process."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.reference import DIGITS, Question, answer
from triptych import AsyncClient
from triptych.cli.cluster import LocalCluster
from triptych.errors import InvalidMedia, ModelNotFound, NotFound, TriptychError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(roles="E:1,PD:1", log_dir=tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.router_target) as connected:
        yield connected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "sdk_sync",
            [
                "models: triptych-demo",
                "answer: 3 7",
                "image 2: 16 tokens on encoder-",
                "stream: T",
                "raw:",
                "refused: the router",
            ],
        ),
        ("sdk_async", ["0_a.png: 0", "9_a.png: 9", "first words:", "too late:"]),
    ],
)
async def test_the_examples_run(cluster: LocalCluster, name: str, said: list[str]) -> None:
    command = [sys.executable, f"examples/{name}.py", cluster.router_target]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for line in said:
        assert line in done.stdout


async def test_answers_equal_generate_token_for_token(client: AsyncClient) -> None:
    question = Question("What digits are shown?", ("3_a", "1_a"))
    images = [DIGITS / f"{name}.png" for name in question.images]
    got = await client.chat(question.text, images, temperature=0, max_tokens=question.max_tokens)
    assert got.choices[0].token_ids == answer(question).token_ids
    assert len(await client.tokenize(question.text, images)) == got.usage.prompt_tokens
    timeline = await client.timeline(got.request_id)
    assert {item.encoder for item in timeline.items} == {"encoder-1"}
    assert timeline.text_instance == "text-1"


async def test_a_closed_stream_frees_its_place(client: AsyncClient) -> None:
    async with client.stream("Who are you?", temperature=0) as stream:
        await anext(stream)
    async with asyncio.timeout(240):
        while (await client.timeline(stream.request_id)).outcome.value == "running":  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.05)


async def test_errors_arrive_unchanged(client: AsyncClient) -> None:
    with pytest.raises(InvalidMedia):
        await client.chat("What is it?", images=[b"not an image"])
    with pytest.raises(ModelNotFound):
        await client.chat("Hi", model="nobody")
    with pytest.raises(NotFound):
        await client.timeline("nobody")


async def test_a_router_that_dies_is_one_clear_error(client: AsyncClient, cluster: LocalCluster) -> None:
    """Last in its module: it kills the router."""

    async def kill_while_it_waits() -> None:
        await asyncio.sleep(0.3)
        cluster.kill("router")

    cluster.kill("text-1", signal.SIGSTOP)  # no answer arrives before the router is killed
    try:
        with pytest.raises(TriptychError):
            await asyncio.gather(client.chat("Who are you?", temperature=0, timeout_s=30), kill_while_it_waits())
    finally:
        cluster.kill("text-1", signal.SIGCONT)
    with pytest.raises(TriptychError):
        await client.ready(timeout_s=1)
