"""The text engine under KV memory pressure and with prefix caching: answers equal ``generate``'s."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.engine.tiny import (
    Question,
    Reference,
    engine_request,
    greedy,
    random_question,
    run,
    text_engine,
)
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.domain.engine import EmbeddingInput, EngineOutput, EngineRequest
from triptych.domain.sampling import SamplingParams
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.errors import EngineFailure, InvalidRequest, Overloaded

pytestmark = pytest.mark.slow

Make = Callable[..., EngineRequest]
SLOT_NBYTES = 2 * 3 * 2 * 16 * 4
LAYOUTS = [KvOptions(4, contiguous=True), KvOptions(4, contiguous=False)]
COPIED = {"copied": None, "recomputed": 0}
"""``preempted_kv_bytes``"""


@pytest.fixture
def make(reference: Reference, encoder: TransformersEncoderEngine) -> Make:
    def make_request(name: str, question: Question, sampling: SamplingParams) -> EngineRequest:
        return engine_request(name, question, reference, encoder, sampling)

    return make_request


@pytest.mark.parametrize("kv", LAYOUTS, ids=["contiguous", "scattered"])
@pytest.mark.parametrize("nbytes", COPIED.values(), ids=COPIED)
def test_answers_of_preempted_sequences_equal_generate(
    model_dir: Path, reference: Reference, make: Make, kv: KvOptions, nbytes: int | None
) -> None:
    questions = {f"r{seed}": random_question(random.Random(seed), (0, 1, 2, 0)[seed % 4]) for seed in range(6)}
    engine = text_engine(model_dir, kv_cache_bytes=84 * SLOT_NBYTES, preempted_kv_bytes=nbytes, token_budget=32, kv=kv)
    outputs: list[EngineOutput] = []
    for name, question in questions.items():
        engine.add(make(name, question, greedy(24, ignore_eos=True)))
        outputs += engine.step()
    assert run(engine, outputs) == {
        name: reference.answer(question, 24, ignore_eos=True) for name, question in questions.items()
    }
    assert engine.preemptions
    assert bool(engine.kv_copies.back) == (nbytes is None)
    assert engine.kv_free_tokens == engine.kv_tokens


@pytest.mark.parametrize("kv", LAYOUTS, ids=["contiguous", "scattered"])
@pytest.mark.parametrize("nbytes", COPIED.values(), ids=COPIED)
def test_preemption_does_not_change_samples(model_dir: Path, kv: KvOptions, nbytes: int | None) -> None:
    sampling = SamplingParams(temperature=1.5, seed=11, max_tokens=20, ignore_eos=True, n=3, frequency_penalty=0.4)
    prompt = tuple(range(4, 13))

    def answers(slots: int) -> tuple[dict[tuple[str, int], list[int]], int]:
        engine = text_engine(model_dir, kv_cache_bytes=slots * SLOT_NBYTES, preempted_kv_bytes=nbytes, kv=kv)
        for name in ("one", "other"):
            engine.add(EngineRequest(name, prompt + (7,) * (name == "other"), (), sampling))
        told: dict[tuple[str, int], list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                told.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        return told, engine.preemptions

    roomy, none = answers(400)
    tight, some = answers(100)
    assert tight == roomy
    assert not none
    assert some


@pytest.mark.parametrize("kv", LAYOUTS, ids=["contiguous", "scattered"])
@pytest.mark.parametrize("nbytes", COPIED.values(), ids=COPIED)
def test_preemption_does_not_change_answers_that_go_on(model_dir: Path, kv: KvOptions, nbytes: int | None) -> None:
    sampling = SamplingParams(temperature=1.5, seed=11, max_tokens=20, ignore_eos=True, n=3, frequency_penalty=0.4)
    prompt = tuple(range(4, 13))

    def answers(slots: int, continued: tuple[ContinuedChoice, ...]) -> tuple[dict[tuple[str, int], list[int]], int]:
        engine = text_engine(model_dir, kv_cache_bytes=slots * SLOT_NBYTES, preempted_kv_bytes=nbytes, kv=kv)
        for name in ("one", "other"):
            engine.add(EngineRequest(name, prompt, (), sampling, continued=continued))
        told: dict[tuple[str, int], list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                told.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        assert engine.kv_free_tokens == engine.kv_tokens
        return told, engine.preemptions

    whole, none = answers(400, ())
    begun = {0: 3, 1: 0, 2: 9}
    continued = tuple(ContinuedChoice(choice, tuple(whole["one", choice][:sent])) for choice, sent in begun.items())
    rest, some = answers(100, continued)
    assert rest == {(name, choice): tokens[begun[choice] :] for (name, choice), tokens in whole.items()}
    assert not none
    assert some


@pytest.mark.parametrize("kv", LAYOUTS, ids=["contiguous", "scattered"])
@pytest.mark.parametrize("token_budget", [7, 64])
def test_cached_prefixes_are_reused(
    model_dir: Path, reference: Reference, make: Make, kv: KvOptions, token_budget: int
) -> None:
    question = random_question(random.Random(2), 2)
    engine = text_engine(model_dir, token_budget=token_budget, max_sequences=4, kv=kv)
    expected = reference.answer(question, 12)
    prompt = len(reference.prompt(question))
    engine.add(make("first", question, greedy(12)))
    assert run(engine)["first"] == expected
    assert engine.prefix_hits_tokens == 0
    engine.add(make("again", question, replace(greedy(12), n=2)))
    longer = replace(question, text=question.text + " w5 w7")
    engine.add(make("longer", longer, greedy(12)))
    answers = run(engine)
    assert answers["again"] in ([*expected, *expected], [token for token in expected for _ in range(2)])
    assert answers["longer"] == reference.answer(longer, 12)
    assert engine.prefix_hits_tokens == (prompt - 1) // 4 * 4 + prompt // 4 * 4
    assert engine.prefix_queries_tokens == 3 * prompt + 2
    assert engine.kv_free_tokens == engine.kv_tokens


def test_prefixes_with_other_images_other_tenants_or_without_identity_are_not_shared(
    model_dir: Path, make: Make
) -> None:
    question = random_question(random.Random(1), 1)
    engine = text_engine(model_dir, kv=KvOptions(1))
    request = make("first", question, greedy(2))
    engine.add(request)
    run(engine)
    (item,) = request.embeddings
    engine.add(replace(request, request_id="image", embeddings=(replace(item, key=b"another"),)))
    run(engine)
    assert engine.prefix_hits_tokens == item.start  # the text before it
    engine.add(replace(request, request_id="tenant", tenant_salt=b"other"))
    run(engine)
    assert engine.prefix_hits_tokens == item.start
    before = engine.prefix_queries_tokens
    engine.add(replace(request, request_id="unknown", embeddings=(replace(item, key=b""),)))
    run(engine)
    assert (engine.prefix_hits_tokens, engine.prefix_queries_tokens) == (item.start, before)


def test_blocks_of_a_failed_request_are_not_cached(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = text_engine(model_dir, kv=KvOptions(1))
    embed_tokens = engine._adapter.decoder.get_input_embeddings()
    whole = embed_tokens.forward
    monkeypatch.setattr(embed_tokens, "forward", lambda ids: whole(ids) * float("nan"))
    request = EngineRequest("bad", (5, 6, 7, 8), (), greedy(4))
    engine.add(request)
    (output,) = engine.step()
    assert isinstance(output.error, EngineFailure)
    monkeypatch.undo()
    engine.add(request)
    assert len(run(engine)["bad"]) in range(1, 5)
    assert engine.prefix_hits_tokens == 0


def embeds(tokens: int) -> dict[str, Tensor]:
    spec = TensorSpec("embeds", DType.F32, (tokens, 64))
    return {"embeds": Tensor(spec, memoryview(torch.zeros(spec.shape).numpy().tobytes()))}


def with_item(name: str, tokens: int) -> EngineRequest:
    return EngineRequest(name, (5, *(2,) * tokens, 6), (EmbeddingInput(1, tokens, embeds(tokens)),), greedy(2))


def test_copies_of_embeddings_are_bounded_and_freed_with_their_request(model_dir: Path) -> None:
    engine = text_engine(model_dir, max_embedding_bytes=10 * 256)
    with pytest.raises(InvalidRequest, match="2816"):
        engine.add(with_item("large", 11))
    engine.add(with_item("one", 6))
    with pytest.raises(Overloaded, match="1536"):
        engine.add(with_item("two", 6))
    run(engine)
    assert engine.embedding_nbytes == 0
    engine.add(with_item("two", 6))
    engine.cancel("two")
    assert engine.embedding_nbytes == 0


def test_the_token_budget_follows_the_latency_objective(model_dir: Path) -> None:
    assert text_engine(model_dir, tpot_slo_s=1e-9, max_sequences=3, token_budget=64).token_budget == 3
    assert text_engine(model_dir, tpot_slo_s=60.0, max_sequences=3, token_budget=64).token_budget == 64
    assert text_engine(model_dir, tpot_slo_s=1e-9, max_sequences=3, token_budget=None).token_budget == 3


@pytest.mark.parametrize("kv_tokens", [64, 400, 4096])
def test_without_a_budget_and_an_objective_the_budget_is_measured(
    model_dir: Path, reference: Reference, make: Make, kv_tokens: int
) -> None:
    """The KV memory does not matter, nor how little of it one prompt can have."""
    kv = KvOptions(4, contiguous=False)
    engine = text_engine(model_dir, token_budget=None, kv_cache_bytes=kv_tokens * SLOT_NBYTES, max_sequences=4, kv=kv)
    prompts = engine.token_budget / min(128, engine.kv_tokens - 1)
    assert prompts in (1, 2, 4, 8, 16, 32)
    assert engine.token_budget <= 2048
    assert not engine.has_work
    assert engine.kv_free_tokens == engine.kv_tokens
    question = random_question(random.Random(2), 1)
    engine.add(make("one", question, greedy(12)))
    assert run(engine)["one"] == reference.answer(question, 12)
