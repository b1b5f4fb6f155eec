"""Each family: with the items of Triptych's encoder, vLLM gives the tokens that it gives alone from images or clips.

Where vLLM alone prepares the items of a request in another way than transformers, it gives those of transformers.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.text_engine_kit import Answers, collect
from tests.integration.families.harness import Case, Encode, Unclear, encoder_process, items_of
from tests.vllm.models import KINDS, TINIES, VIDEO_KINDS, Tiny
from tests.vllm.reference import MAX_TOKENS, Known, Reference
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.families.here import process_here
from triptych.integrations.vllm.engine import VllmTextEngine

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

VLLM_ARGS = "--kv-cache-memory-bytes 67108864 --enforce-eager --block-size 32"
EVERY = "TRIPTYCH_TEST_VLLM_FAMILIES"
"""Names the file in the environment to which results of all models are written."""
CONCURRENT = 16
_TRIES = 20
LANGUAGE_MODEL = ("language_model.", "model.text_model.", "lm_head.")


@dataclass
class Served:
    """A tiny model in an engine, and beside it vLLM alone."""

    model: Tiny
    case: Case
    engine: VllmTextEngine
    reference: Reference | None

    def known(self, kind: str, number: int) -> Known:
        """The ``number``-th question of this kind, and its answer, by vLLM alone or by transformers."""
        if self.reference is not None and kind in KINDS and len(KINDS[kind]) <= self.model.vllm_prepares:
            return self.reference.known(kind, number)
        placeholders = self.case.builder.family.placeholder_ids
        for seed in range(number * _TRIES, (number + 1) * _TRIES):
            question = self.model.question(self.model.kinds[kind], seed)
            with suppress(Unclear):
                # Models may embed a placeholder that they generate otherwise. Published ones do not generate any.
                if placeholders.isdisjoint(answer := self.case.answer(question, MAX_TOKENS)):
                    return Known(question, tuple(answer), clear=True)
        raise AssertionError("no question has a clear answer")

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
def results() -> Iterator[dict[str, dict[str, str]]]:
    """What is known of each model after its tests, for the table of docs/vllm.md."""
    found: dict[str, dict[str, str]] = {}
    yield found
    if name := os.environ.get(EVERY):  # noqa: TID251  # whoever runs the tests names it
        path = Path(name)
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | found, indent=1, sort_keys=True))


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
    asks_vllm = model.vllm_prepares >= 0
    reference = Reference(model, directory, tmp_path_factory.mktemp("reference") / "log") if asks_vllm else None
    try:
        engine = VllmTextEngine(
            open_checkpoint(directory, process_here),
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
        if reference is not None:
            reference.close()


def test_only_the_language_model_is_loaded(served: Served) -> None:
    model: Any = served.engine._engine.model_executor.driver_worker.model_runner.model
    names = [name for name, _ in model.named_parameters()]
    assert names
    assert [name for name in names if not name.startswith(LANGUAGE_MODEL)] == []


@pytest.mark.parametrize("kind", [*KINDS, *VIDEO_KINDS])
def test_tokens_are_those_from_images_videos_or_clips(served: Served, kind: str) -> None:
    if kind not in served.model.kinds:
        pytest.skip("the model takes no such request")
    known = served.known(kind, 0)
    assert served.answers(known) == [known.token_ids]


def test_concurrent_requests_get_the_same_tokens(served: Served, results: dict[str, dict[str, str]]) -> None:
    kinds = list(served.model.kinds)
    known = [served.known(kinds[number % len(kinds)], number) for number in range(CONCURRENT)]
    assert served.answers(*known) == [example.token_ids for example in known]
    media = {item.info.modality.value for example in known for item in items_of(example.question)}
    reference = "transformers" if served.reference is None else "vLLM"
    results[served.model.name] = {"media": ", ".join(sorted(media)), "reference": reference}
