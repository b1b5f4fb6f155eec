"""A ``vllm serve`` of its own answers, token for token, as vLLM alone does from pixels; what is lost fails one request."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.client import rest
from tests.integration.families.harness import Item, Question, items_of
from tests.vllm.models import KINDS, MODELS
from tests.vllm.reference import ROOT, Known, Reference
from tests.vllm.serving import SERVED, ask, is_healthy, tokens_of, vllm_serve
from triptych.cli.cluster import LocalCluster
from triptych.client import AsyncClient, ResolvedItem
from triptych.integrations.vllm.parts import image_part

pytestmark = [pytest.mark.timeout(500), pytest.mark.asyncio(loop_scope="module")]

CONCURRENT = 16
UNKNOWN = "ab" * 32
TIMEOUT_S = 8.0
"""How long a request waits for its items."""


@dataclass
class Served:
    cluster: LocalCluster
    client: AsyncClient
    vllm: httpx.AsyncClient
    reference: Reference
    log: Path

    async def tokens(self, question: Question) -> tuple[int, ...]:
        async with self.resolved(question) as parts:
            return tokens_of(await ask(self.vllm, parts))

    def resolved(self, question: Question) -> "Resolved":
        return Resolved(self.client, question)

    async def metric(self, process: str, name: str) -> float:
        """The sum of a metric's values at a process."""
        async with rest(self.cluster.admin_urls[process]) as client:
            return samples((await client.get("/metrics")).text, name)

    async def leases(self) -> float:
        return sum([await self.metric(f"encoder-{number}", "triptych_arena_leases") for number in (1, 2)])

    async def keys_asked(self) -> float:
        """Of all requests so far. They are counted as they end, after their answers: with the last lease."""
        await no_leases(self)
        return await self.metric("router", "triptych_resolved_keys_total")


@dataclass
class Resolved:
    """A question's parts for vLLM, within a context in which its images are held."""

    client: AsyncClient
    question: Question

    async def __aenter__(self) -> list[Mapping[str, Any]]:
        images = [item.media for item in items_of(self.question)]
        self._held = self.client.resolve(images) if images else None
        items = () if self._held is None else await self._held.__aenter__()
        return parts_of(self.question, items)

    async def __aexit__(self, *error: object) -> None:
        if self._held is not None:
            await self._held.__aexit__(None, None, None)


def parts_of(question: Question, items: Sequence[ResolvedItem]) -> list[Mapping[str, Any]]:
    left = iter(items)
    return [image_part(next(left)) if isinstance(part, Item) else {"type": "text", "text": part} for part in question]


def _cases() -> Iterator[Any]:
    for model in MODELS:
        yield pytest.param(model, id=model, marks=() if model == "demo" else pytest.mark.extended)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=_cases())
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    model = MODELS[request.param]
    directory = model.make(tmp_path_factory.mktemp(model.name))
    logs = tmp_path_factory.mktemp("logs")
    reference = Reference(model, directory, logs / "reference")
    try:
        async with (
            LocalCluster(directory, log_dir=logs, restart=True) as cluster,
            vllm_serve(directory, cluster.router_target, logs / "vllm", timeout_s=TIMEOUT_S) as vllm,
            AsyncClient(cluster.router_target) as client,
        ):
            yield Served(cluster, client, vllm, reference, logs / "vllm")
    finally:
        reference.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_equal_vllms_own(served: Served, kind: str) -> None:
    known = served.reference.known(kind, 0)
    assert await served.tokens(known.question) == known.token_ids


async def test_concurrent_requests_get_the_same_tokens(served: Served) -> None:
    kinds = list(KINDS)
    known = [served.reference.known(kinds[number % len(kinds)], number) for number in range(CONCURRENT)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(served.tokens(example.question)) for example in known]
    assert [task.result() for task in tasks] == [example.token_ids for example in known]


async def test_no_lease_is_left(served: Served) -> None:
    await served.tokens(served.reference.known("two", 0).question)
    await no_leases(served)


async def test_an_image_that_is_there_is_not_asked_for_again(served: Served) -> None:
    known = served.reference.known("one", 20)
    assert await served.tokens(known.question) == known.token_ids
    asked = await served.keys_asked()
    another: Question = ("Look here, and say: ", *known.question)  # shares no prefix up to the image
    await served.tokens(another)
    assert await served.keys_asked() == asked
    assert await served.tokens(known.question) == known.token_ids
    assert await served.keys_asked() == asked


async def test_an_item_that_nobody_holds_fails_its_request_alone(served: Served) -> None:
    other, question = served.reference.known("two", 0), served.reference.known("one", 0).question
    async with served.resolved(question) as parts:
        for uuid, reason in ((UNKNOWN, "no embedding of this key is held"), ("hello", "'hello' is no key")):
            renamed = [{**part, "uuid": uuid} if "uuid" in part else part for part in parts]
            async with asyncio.TaskGroup() as group:
                lost = group.create_task(ask(served.vllm, renamed))
                others = [group.create_task(served.tokens(other.question)) for _ in range(4)]
            assert_unavailable(lost.result())
            assert reason in served.log.read_text()
            assert [task.result() for task in others] == [other.token_ids] * 4
    await still_answers(served, other)


async def test_an_item_of_another_length_fails_its_request_alone(served: Served) -> None:
    question = served.reference.model.question(KINDS["one"], 77)
    async with served.client.resolve([item.media for item in items_of(question)]) as items:
        response = await ask(served.vllm, parts_of(question, [longer(item) for item in items]))
        assert_unavailable(response)
    assert re.search(r"has \d+ rows, the prompt has \d+ placeholders for it", served.log.read_text())
    await still_answers(served, served.reference.known("two", 0))


async def test_the_example_runs(served: Served) -> None:
    if served.reference.model.name != "demo":
        pytest.skip("the example asks the demo model")
    command = [
        sys.executable,
        "examples/vllm_serve.py",
        served.cluster.router_target,
        str(served.vllm.base_url),
        SERVED,
    ]
    run = partial(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    done = await asyncio.to_thread(run)
    assert done.returncode == 0, done.stderr
    answer = done.stdout.splitlines()[-1]
    assert answer.startswith("answer: ")
    assert "3" in answer
    assert "7" in answer


async def test_a_client_that_leaves_while_its_items_are_awaited_leaves_nothing(served: Served) -> None:
    question = served.reference.model.question(KINDS["two"], 79)
    encoders = [name for name in served.cluster.processes if name.startswith("encoder")]
    async with served.resolved(question) as parts:
        for name in encoders:
            served.cluster.kill(name, signal.SIGSTOP)
        try:
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(ask(served.vllm, parts))
                await until(served, "vllm:num_requests_waiting", 1)
                asked.cancel()
        finally:
            for name in encoders:
                served.cluster.kill(name, signal.SIGCONT)
        await until(served, "vllm:num_requests_waiting", 0)
    await still_answers(served, served.reference.known("two", 0))
    await no_leases(served)


async def test_an_item_whose_encoder_has_died_fails_its_request_alone(served: Served) -> None:
    question = served.reference.model.question(KINDS["one"], 78)
    known = served.reference.known("one", 0)
    async with served.client.resolve([item.media for item in items_of(question)]) as items:
        holder = next(name for name, address in served.cluster.targets.items() if address == items[0].ticket.address)
        served.cluster.kill(holder)
        async with asyncio.TaskGroup() as group:
            lost = group.create_task(ask(served.vllm, parts_of(question, items)))
            other = group.create_task(served.tokens(known.question))
        assert_unavailable(lost.result())
        assert other.result() == known.token_ids
    await still_answers(served, served.reference.known("mixed", 0))
    assert await served.tokens(question), "resolved again, it is answered"


@pytest.mark.extended
async def test_workers_of_one_vllm_share_one_pull(tmp_path: Path) -> None:
    model = MODELS["demo"]
    directory = model.make(tmp_path)
    reference = Reference(model, directory, tmp_path / "reference")
    try:
        async with (
            LocalCluster(directory, log_dir=tmp_path) as cluster,
            vllm_serve(directory, cluster.router_target, tmp_path / "vllm", workers=2) as vllm,
            AsyncClient(cluster.router_target) as client,
        ):
            served = Served(cluster, client, vllm, reference, tmp_path / "vllm")
            known = reference.known("two", 0)
            assert await served.tokens(known.question) == known.token_ids
            assert await served.keys_asked() == 2
            await no_leases(served)
    finally:
        reference.close()


def longer(item: ResolvedItem) -> ResolvedItem:
    """The same name, with room for more rows."""
    if item.grid:
        time, height, width = item.grid
        return replace(item, grid=(time, height, 2 * width))
    tensors = tuple(replace(spec, shape=(spec.shape[0] + 1, *spec.shape[1:])) for spec in item.ticket.tensors)
    return replace(item, ticket=replace(item.ticket, tensors=tensors))


async def until(served: Served, metric: str, value: float) -> None:
    """Wait for a metric of vLLM."""
    async with asyncio.timeout(60):
        while samples((await served.vllm.get("/metrics")).text, metric) != value:  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.02)


def samples(text: str, name: str) -> float:
    """The sum of a metric's values."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def still_answers(served: Served, known: Known) -> None:
    assert await served.tokens(known.question) == known.token_ids
    assert await is_healthy(served.vllm)


def assert_unavailable(response: httpx.Response) -> None:
    assert response.status_code == httpx.codes.SERVICE_UNAVAILABLE, response.text
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert "retry-after" not in response.headers
    assert "resolve them and send it again" in response.json()["error"]["message"]


async def no_leases(served: Served) -> None:
    async with asyncio.timeout(60):
        while await served.leases():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
