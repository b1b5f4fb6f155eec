"""Each family: with the items of Triptych's encoder, vLLM gives the tokens that it gives alone from images or clips.

Where vLLM alone prepares the items of a request in another way than transformers, it gives those of transformers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.contract.text_engine_kit import Answers, collect
from tests.integration.families.harness import Case, Encode, encoder_process
from tests.vllm.models import KINDS, TINIES, Tiny
from tests.vllm.reference import MAX_TOKENS, Known, Reference
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.integrations.vllm.engine import VllmTextEngine

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

VLLM_ARGS = "--kv-cache-memory-bytes 67108864 --enforce-eager --block-size 32"
CONCURRENT = 16
LANGUAGE_MODEL = ("language_model.", "model.text_model.", "lm_head.")


@dataclass
class Served:
    """A tiny model in an engine, and beside it vLLM alone."""

    model: Tiny
    case: Case
    engine: VllmTextEngine
    reference: Reference

    def known(self, kind: str, number: int) -> Known:
        """The ``number``-th question of this kind, and its answer."""
        if len(KINDS[kind]) < 2 or not self.model.alone_only:
            return self.reference.known(kind, number)
        question = self.model.question(KINDS[kind], number)
        return Known(question, tuple(self.case.answer(question, MAX_TOKENS)), clear=True)

    def answers(self, *known: Known) -> list[tuple[int, ...]]:
        """To all of these at once."""
        for number, example in enumerate(known):
            self.engine.add(self.case.request(f"r{number}", example.question, MAX_TOKENS))
        answers: Answers = {}
        while self.engine.has_work:
            collect(answers, self.engine.step())
        assert [answer.error for answer in answers.values() if answer.error] == []
        return [tuple(answers[f"r{number}", 0].token_ids) for number in range(len(known))]


@pytest.fixture(scope="module")
def encode() -> Iterator[Encode]:
    with encoder_process() as encode:
        yield encode


@pytest.fixture(scope="module", params=TINIES)
def served(
    request: pytest.FixtureRequest, encode: Encode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model = TINIES[request.param]
    directory = model.make(tmp_path_factory.mktemp(model.name))
    reference = Reference(model, directory, tmp_path_factory.mktemp("reference") / "log")
    try:
        engine = VllmTextEngine(
            open_checkpoint(directory),
            VLLM_ARGS,
            model_id=model.name,
            max_embedding_bytes=64 << 20,
            compute=ComputeOptions(),
        )
        try:
            yield Served(model, Case(model.family, directory, encode), engine, reference)
        finally:
            engine.close()
    finally:
        reference.close()


def test_only_the_language_model_is_loaded(served: Served) -> None:
    model: Any = served.engine._engine.model_executor.driver_worker.model_runner.model
    names = [name for name, _ in model.named_parameters()]
    assert names
    assert [name for name in names if not name.startswith(LANGUAGE_MODEL)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_from_images_or_clips(served: Served, kind: str) -> None:
    known = served.known(kind, 0)
    assert served.answers(known) == [known.token_ids]


def test_concurrent_requests_get_the_same_tokens(served: Served) -> None:
    kinds = list(KINDS)
    known = [served.known(kinds[number % len(kinds)], number) for number in range(CONCURRENT)]
    assert served.answers(*known) == [example.token_ids for example in known]
