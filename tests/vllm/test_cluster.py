"""Whole clusters answer, token for token, as vLLM alone does from pixels."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.client import rest, stream_message
from tests.integration.families.harness import Item, Question, items_of, message_of
from tests.vllm.models import KINDS, MODELS, item
from tests.vllm.reference import MAX_TOKENS, Known, Reference
from triptych.cli.cluster import LocalCluster
from triptych.domain.chat import ChatRequest
from triptych.domain.sampling import SamplingParams
from triptych.errors import InvalidMedia, TriptychError
from triptych.rpc.stubs import RouterStub

pytestmark = [pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

BLOCK_TOKENS = 32
VLLM_ARGS = f"--enforce-eager --kv-cache-memory-bytes {64 << 20} --block-size {BLOCK_TOKENS}"
_TEXT = {"text": ("--engine", "vllm", "--vllm-args", VLLM_ARGS)}
_ENCODERS = {"encoder": ("--engine", "vllm")}
ENGINES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "vllm": _TEXT,
    "triptych": {},
    "vllm throughout": {**_TEXT, **_ENCODERS},
    "triptych with encoders of vllm": _ENCODERS,
}
"""Flags of the instances, by service."""
QUICK = {("demo", "vllm"), ("demo", "vllm throughout")}
CONCURRENT = 16
OTHERS = 100
NEVER_S = 4.0
"""Timeout of a request whose item does not arrive."""


@dataclass
class Served:
    """A model behind a cluster, and beside it vLLM alone."""

    cluster: LocalCluster
    router: RouterStub
    reference: Reference
    _names: Iterator[int] = field(default_factory=count)

    async def tokens(self, question: Question) -> tuple[int, ...]:
        name = f"r{next(self._names)}"
        return (await stream_message(self.router, name, MODEL_ID, message_of(question), MAX_TOKENS)).token_ids

    async def prefix_hits_tokens(self) -> float:
        """Tokens of prompts that were found in the text instance's prefix cache until now."""
        async with rest(self.cluster.admin_urls["text-1"]) as client:
            text = (await client.get("/metrics")).text
        return sum(float(value) for value in re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.MULTILINE))


MODEL_ID = "served"


def _cases() -> Iterator[Any]:
    for model in MODELS:
        for engine in ENGINES:
            marks = () if (model, engine) in QUICK else pytest.mark.extended
            yield pytest.param((model, engine), id=f"{model} by {engine}", marks=marks)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=_cases())
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    name, engine = request.param
    model, options = MODELS[name], ENGINES[engine]
    directory = model.make(tmp_path_factory.mktemp(model.name))
    reference = Reference(model, directory, tmp_path_factory.mktemp("reference") / "log")
    try:
        async with LocalCluster(
            f"{MODEL_ID}={directory}", options=options, log_dir=tmp_path_factory.mktemp("logs"), restart=True
        ) as cluster:
            router = RouterStub(cluster.router_target)
            yield Served(cluster, router, reference)
            await router.close()
    finally:
        reference.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_equal_vllms_own(served: Served, kind: str) -> None:
    known = served.reference.known(kind, 0)
    assert await served.tokens(known.question) == known.token_ids


async def test_other_images_change_the_answer(served: Served) -> None:
    """Shows that the tests above could fail."""
    first, second = _same_prompt_other_images(served.reference)
    assert first.token_ids != second.token_ids


async def test_concurrent_requests_get_the_same_tokens(served: Served) -> None:
    kinds = list(KINDS)
    known = [served.reference.known(kinds[number % len(kinds)], number) for number in range(CONCURRENT)]
    assert await _all(served, known) == [example.token_ids for example in known]


async def test_images_of_equal_size_in_equal_prompts_share_no_prefix(served: Served) -> None:
    first, second = _same_prompt_other_images(served.reference)
    assert await served.tokens(first.question) == first.token_ids
    before = await served.prefix_hits_tokens()
    assert await served.tokens(second.question) == second.token_ids
    assert await served.prefix_hits_tokens() == before, (
        "only the text before the first image is the same, less than a block"
    )
    assert await served.tokens(first.question) == first.token_ids
    assert await served.prefix_hits_tokens() >= before + BLOCK_TOKENS


async def test_an_item_that_is_late_delays_its_request_alone(served: Served) -> None:
    text, image = served.reference.known("text", 0), served.reference.known("one", 40)
    async with asyncio.TaskGroup() as group:
        with _stopped_encoders(served):
            late = group.create_task(served.tokens(image.question))
            assert await _all(served, [text] * CONCURRENT) == [text.token_ids] * CONCURRENT
            assert not late.done()
    assert late.result() == image.token_ids


async def test_an_item_that_never_arrives_fails_its_request_alone(served: Served) -> None:
    text, image = served.reference.known("text", 0), served.reference.known("one", 41)
    with _stopped_encoders(served):
        async with asyncio.TaskGroup() as group:
            lost = group.create_task(_error_of(served, image.question))
            others = group.create_task(_all(served, [text] * OTHERS))
    assert isinstance(lost.result(), TriptychError)
    assert others.result() == [text.token_ids] * OTHERS
    assert await served.tokens(image.question) == image.token_ids


async def test_an_image_that_cannot_be_decoded_fails_its_request_alone(served: Served) -> None:
    known = [served.reference.known(kind, 60) for kind in ("one", "two", "mixed")]
    (whole,) = items_of(served.reference.model.question(KINDS["one"], 61))
    middle = len(whole.media) // 2
    damaged = item(whole.media[:middle] + bytes(16) + whole.media[middle + 16 :])  # only its pixels
    async with asyncio.TaskGroup() as group:
        failed = group.create_task(_error_of(served, (damaged, "What is it?")))
        others = group.create_task(_all(served, known))
    assert isinstance(failed.result(), InvalidMedia)
    assert others.result() == [example.token_ids for example in known]


async def test_an_encoder_killed_under_load_changes_no_answer(served: Served) -> None:
    known = [served.reference.known(kind, 50 + number) for number in range(4) for kind in ("one", "two", "mixed")]
    async with asyncio.TaskGroup() as group:
        asked = [(example, group.create_task(served.tokens(example.question))) for example in (*known, *known, *known)]
        await asyncio.wait([task for _, task in asked], return_when=asyncio.FIRST_COMPLETED)
        served.cluster.kill("encoder-1")
    assert [task.result() for _, task in asked] == [example.token_ids for example, _ in asked]


def _same_prompt_other_images(reference: Reference) -> tuple[Known, Known]:
    """Two questions with one text and images of the same sizes, which have different clear answers."""
    for seed in count(1000):
        question, other = (reference.model.question(KINDS["mixed"], number) for number in (seed, seed + 1))
        images = iter(items_of(other))
        swapped = tuple(next(images) if isinstance(part, Item) else part for part in question)
        known = reference.ask(question), reference.ask(swapped)
        if all(example.clear for example in known) and known[0].token_ids != known[1].token_ids:
            return known
    raise AssertionError


async def _all(served: Served, known: Sequence[Known]) -> list[tuple[int, ...]]:
    """The tokens of all of these, asked at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(served.tokens(example.question)) for example in known]
    return [task.result() for task in tasks]


async def _error_of(served: Served, question: Question) -> TriptychError | None:
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    request = ChatRequest("lost", MODEL_ID, (message_of(question),), sampling, timeout_s=NEVER_S)
    try:
        async for _ in served.router.chat(request):
            pass
    except TriptychError as error:
        return error
    return None


@contextmanager
def _stopped_encoders(served: Served) -> Iterator[None]:
    """Stop both encoders: they do nothing, not even fail."""
    names = [name for name in served.cluster.processes if name.startswith("encoder")]
    for name in names:
        served.cluster.kill(name, signal.SIGSTOP)
    try:
        yield
    finally:
        for name in names:
            served.cluster.kill(name, signal.SIGCONT)
