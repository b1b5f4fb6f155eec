"""Encoder and text engines against the whole model's ``generate``: float32, greedy, token for token."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.tiny import (
    EOS,
    Question,
    Reference,
    engine_request,
    greedy,
    make_model,
    random_question,
    run,
    text_engine,
)
from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.domain.engine import EmbeddingInput, EngineOutput, EngineRequest
from triptych.domain.generation import FinishReason
from triptych.domain.queue_position import QueuePosition
from triptych.domain.sampling import SamplingParams
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.errors import ContextTooLong, EngineFailure, InvalidRequest

Make = Callable[..., EngineRequest]
SLOT_NBYTES = 2 * 3 * 2 * 16 * 4
BY_TOKEN = KvOptions(block_tokens=1)


@pytest.fixture
def make(reference: Reference, encoder: TransformersEncoderEngine) -> Make:
    def make_request(name: str, question: Question, sampling: SamplingParams) -> EngineRequest:
        return engine_request(name, question, reference, encoder, sampling)

    return make_request


@pytest.fixture(scope="module")
def refusing(model_dir: Path) -> Iterator[TransformersTextEngine]:
    """An engine of all tests whose only requests are refused. Nothing of them may be left in it."""
    engine = text_engine(model_dir)
    yield engine
    assert not engine.has_work


def text_request(name: str, prompt_tokens: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(name, tuple(range(4, 4 + prompt_tokens)), (), greedy(max_tokens, ignore_eos=True))


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [0, 1, 2, 8])
def test_answers_equal_generate(model_dir: Path, reference: Reference, make: Make, images: int) -> None:
    question = random_question(random.Random(images), images)
    engine = text_engine(model_dir)
    engine.add(make("one", question, greedy(24)))
    assert run(engine)["one"] == reference.answer(question, 24)


def test_sixteen_mixed_requests_that_arrive_one_by_one_each_equal_generate(
    model_dir: Path, reference: Reference, make: Make
) -> None:
    engine = text_engine(model_dir, max_sequences=7, token_budget=40)
    questions = {f"r{seed}": random_question(random.Random(seed), (0, 1, 2, 4)[seed % 4]) for seed in range(16)}
    outputs: list[EngineOutput] = []
    for number, (name, question) in enumerate(questions.items()):
        engine.add(make(name, question, greedy(8 + number)))
        outputs += engine.step() + engine.step()
    answers = run(engine, outputs)
    assert answers == {
        name: reference.answer(question, 8 + number) for number, (name, question) in enumerate(questions.items())
    }


@pytest.mark.parametrize("token_budget", [1, 5, 16])
def test_prefill_chunks_may_split_an_image(
    model_dir: Path, reference: Reference, make: Make, token_budget: int
) -> None:
    question = random_question(random.Random(2), 2)
    engine = text_engine(model_dir, max_sequences=1, token_budget=token_budget)
    engine.add(make("one", question, greedy(12)))
    assert run(engine)["one"] == reference.answer(question, 12)


def test_images_change_the_answer(model_dir: Path, reference: Reference, make: Make) -> None:
    question = random_question(random.Random(1), 1)
    other = replace(question, images=random_question(random.Random(5), 1).images)
    engine = text_engine(model_dir)
    engine.add(make("one", question, greedy(8)))
    engine.add(make("other", other, greedy(8)))
    answers = run(engine)
    assert answers["one"] != answers["other"]


def test_two_engines_run_in_one_process(model_dir: Path, reference: Reference, make: Make) -> None:
    question = random_question(random.Random(1), 1)
    engines = [text_engine(model_dir), text_engine(model_dir, token_budget=16)]
    outputs: list[list[EngineOutput]] = [[], []]
    for engine in engines:
        engine.add(make("one", question, greedy(12)))
    while any(engine.has_work for engine in engines):
        for engine, seen in zip(engines, outputs, strict=True):
            seen.extend(engine.step())
    expected = reference.answer(question, 12)
    assert [[token for output in seen for token in output.token_ids] for seen in outputs] == [expected, expected]


def test_bfloat16_runs(model_dir: Path) -> None:
    engine = text_engine(model_dir, dtype="bfloat16")
    engine.add(text_request("one", 5, 4))
    assert len(run(engine)["one"]) == 4
    assert engine.accepts(3, [TensorSpec("embeds", DType.BF16, (3, 64))])
    assert not engine.accepts(3, [TensorSpec("embeds", DType.F32, (3, 64))])


# --- the end of an answer --------------------------------------------------------------------------------------------


def test_an_end_token_ends_the_answer_and_is_reported(model_dir: Path, reference: Reference, make: Make) -> None:
    question = random_question(random.Random(8), 0)
    expected = reference.answer(question, 20)
    assert expected[-1] == EOS
    assert len(expected) < 20
    engine = text_engine(model_dir)
    engine.add(make("one", question, greedy(20)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [token for output in outputs for token in output.token_ids] == expected
    assert [output.finish_reason for output in outputs] == [None] * (len(expected) - 1) + [FinishReason.STOP]


def test_ignore_eos_continues_to_max_tokens(model_dir: Path, reference: Reference, make: Make) -> None:
    question = random_question(random.Random(8), 0)
    engine = text_engine(model_dir)
    engine.add(make("one", question, greedy(20, ignore_eos=True)))
    answer = run(engine)["one"]
    assert len(answer) == 20
    assert answer == reference.answer(question, 20, ignore_eos=True)


def test_max_tokens_ends_the_answer(model_dir: Path) -> None:
    engine = text_engine(model_dir)
    engine.add(text_request("one", 5, 1))
    (output,) = engine.step()
    assert (output.finish_reason, len(output.token_ids), engine.has_work) == (FinishReason.LENGTH, 1, False)


def test_each_of_several_end_tokens_ends_the_answer(tmp_path: Path, model_dir: Path) -> None:
    first = text_engine(model_dir)
    first.add(text_request("one", 5, 3))
    answer = run(first)["one"]
    engine = text_engine(make_model(tmp_path, eos=[EOS, answer[1]]))
    engine.add(replace(text_request("one", 5, 3), sampling=greedy(3)))
    assert run(engine)["one"] == answer[:2]


# --- sampling --------------------------------------------------------------------------------------------------------


def test_a_sample_does_not_depend_on_its_batch(model_dir: Path, make: Make) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=1234, max_tokens=16)
    request = make("one", random_question(random.Random(3), 1), sampling)
    alone = text_engine(model_dir)
    alone.add(request)
    expected = run(alone)["one"]
    crowded = text_engine(model_dir, token_budget=24)
    for seed in range(6):
        noise = SamplingParams(temperature=1.0, seed=seed, max_tokens=4 + seed)
        crowded.add(make(f"n{seed}", random_question(random.Random(seed), seed % 3), noise))
    crowded.step()
    crowded.add(request)
    assert run(crowded)["one"] == expected


def test_seeds_give_different_samples(model_dir: Path) -> None:
    engine = text_engine(model_dir)
    for seed in range(4):
        sampling = SamplingParams(temperature=2.0, seed=seed, max_tokens=16, ignore_eos=True)
        engine.add(replace(text_request(str(seed), 5, 16), sampling=sampling))
    assert len({tuple(answer) for answer in run(engine).values()}) == 4


def test_a_repetition_penalty_equals_generates(model_dir: Path, reference: Reference, make: Make) -> None:
    question = random_question(random.Random(4), 1)
    engine = text_engine(model_dir)
    engine.add(make("one", question, replace(greedy(20, ignore_eos=True), repetition_penalty=1.7)))
    inputs = reference.inputs(question)
    out = reference.model.generate(
        **inputs, max_new_tokens=20, do_sample=False, repetition_penalty=1.7, eos_token_id=None
    )
    assert run(engine)["one"] == out[0, inputs["input_ids"].shape[1] :].tolist()


def test_stop_ids_end_the_answer_but_not_before_min_tokens(model_dir: Path) -> None:
    engine = text_engine(model_dir)
    engine.add(text_request("free", 5, 12))
    free = run(engine)["free"]
    ends = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(free[2],))
    engine.add(replace(text_request("stops", 5, 12), sampling=ends))
    engine.add(replace(text_request("waits", 5, 12), sampling=replace(ends, min_tokens=12)))
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step()
    answers = run(engine, outputs)
    assert answers["stops"] == free[:3]
    assert [o.finish_reason for o in outputs if o.request_id == "stops"][-1] is FinishReason.STOP
    assert len(answers["waits"]) == 12
    assert free[2] not in answers["waits"]


def test_logprobs_equal_those_of_the_whole_model(model_dir: Path, reference: Reference, make: Make) -> None:
    question = random_question(random.Random(1), 1)
    engine = text_engine(model_dir)
    engine.add(make("one", question, replace(greedy(6, ignore_eos=True), logprobs=4)))
    scores = []
    while engine.has_work:
        scores += [entry for output in engine.step() for entry in output.scores]
    out = reference.model.generate(
        **reference.inputs(question),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = torch.stack(out.logits)[:, 0].log_softmax(-1).topk(4)
    assert [[scored.token_id for scored in entry.top] for entry in scores] == expected.indices.tolist()
    for entry, values in zip(scores, expected.values.tolist(), strict=True):
        assert [scored.logprob for scored in entry.top] == pytest.approx(values, abs=1e-4)
        assert entry.chosen == entry.top[0]


# --- several choices ------------------------------------------------------------------------------------------------


def by_choice(engine: TransformersTextEngine) -> dict[tuple[str, int], list[int]]:
    answers: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
    return answers


def test_greedy_choices_all_equal_generate(model_dir: Path, reference: Reference, make: Make) -> None:
    question = random_question(random.Random(2), 2)
    engine = text_engine(model_dir, token_budget=16, max_sequences=8)
    engine.add(make("one", question, replace(greedy(12), n=3)))
    engine.add(make("other", question, greedy(12)))
    expected = reference.answer(question, 12)
    answers = by_choice(engine)
    assert answers == {("one", 0): expected, ("one", 1): expected, ("one", 2): expected, ("other", 0): expected}


def test_choices_are_sampled_independently_of_their_number(model_dir: Path, make: Make) -> None:
    sampling = SamplingParams(temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)
    question = random_question(random.Random(3), 1)
    engine = text_engine(model_dir)
    engine.add(make("four", question, replace(sampling, n=4)))
    engine.add(make("two", question, replace(sampling, n=2)))
    answers = by_choice(engine)
    assert len({tuple(answers["four", choice]) for choice in range(4)}) == 4
    assert [answers["two", choice] for choice in range(2)] == [answers["four", choice] for choice in range(2)]


def test_choices_get_memory_together_or_wait_without_any(model_dir: Path) -> None:
    engine = text_engine(model_dir, kv_cache_bytes=50 * SLOT_NBYTES, kv=BY_TOKEN)
    engine.add(text_request("runs", 20, 10))
    choices = replace(text_request("choices", 10, 5), sampling=replace(greedy(5, ignore_eos=True), n=3))
    engine.add(choices)
    engine.step()
    assert engine.kv_free_tokens == 29  # two of the three fit
    assert {name: len(answer) for name, answer in by_choice(engine).items()} == {
        ("runs", 0): 9,
        ("choices", 0): 5,
        ("choices", 1): 5,
        ("choices", 2): 5,
    }
    assert engine.kv_free_tokens == engine.kv_tokens


def test_choices_wait_for_places_for_all_of_them(model_dir: Path) -> None:
    engine = text_engine(model_dir, max_sequences=4)
    engine.add(text_request("one", 5, 4))
    engine.add(text_request("two", 5, 4))
    engine.add(replace(text_request("choices", 5, 4), sampling=replace(greedy(4, ignore_eos=True), n=3)))
    assert {output.request_id for output in engine.step()} == {"one", "two"}
    assert {output.request_id for output in engine.step()} == {"one", "two"}
    assert sum(map(len, by_choice(engine).values())) == 4 + 12


def test_a_request_that_waits_gets_another_queue_position(model_dir: Path) -> None:
    engine = text_engine(model_dir, max_sequences=1)
    engine.add(text_request("runs", 5, 2))
    engine.step()
    for arrival, name in enumerate(("lost", "short")):
        engine.add(replace(text_request(name, 5, 2), queue_position=QueuePosition(0, 1.0 + arrival, arrival)))
    for name in ("lost", "runs", "unknown"):
        engine.reorder(name, QueuePosition(0, 30.0, 0))
    order = [output.request_id for _ in range(5) for output in engine.step()]
    assert order == ["runs", "short", "short", "lost", "lost"]


@pytest.mark.parametrize(("n", "param"), [(0, "n"), (5, "n"), (4, None)])
def test_more_choices_than_sequences_are_refused(model_dir: Path, n: int, param: str | None) -> None:
    engine = text_engine(model_dir, max_sequences=4, kv_cache_bytes=60 * SLOT_NBYTES)
    with pytest.raises(InvalidRequest) as caught:
        engine.add(replace(text_request("choices", 10, 6), sampling=replace(greedy(6), n=n)))
    assert caught.value.param == param
    assert not engine.has_work


def test_one_choice_can_be_cancelled_and_the_prompt_is_still_computed(model_dir: Path) -> None:
    engine = text_engine(model_dir, token_budget=16)
    sampling = SamplingParams(temperature=1.5, seed=7, max_tokens=6, ignore_eos=True, n=3)
    engine.add(replace(text_request("a", 20, 6), sampling=sampling))
    whole = by_choice(engine)
    engine = text_engine(model_dir, token_budget=16)
    engine.add(replace(text_request("a", 20, 6), sampling=sampling))
    assert engine.pending_tokens == 20 + 18
    engine.step()
    engine.cancel("a", 0)
    assert engine.pending_tokens == 20 + 12  # the next in the queue starts with the prompt again
    left = by_choice(engine)
    assert left == {key: answer for key, answer in whole.items() if key[1]}
    assert engine.kv_free_tokens == engine.kv_tokens


def test_a_choice_that_fails_ends_its_request_once(model_dir: Path) -> None:
    class Broken:
        def __init__(self, *, good: bool) -> None:
            self.good = good

        def fork(self) -> "Broken":
            self.good, good = False, self.good  # the first fork is the good one
            return Broken(good=good)

        def allowed(self) -> bytes:
            if self.good:
                return b"\xff" * 32
            raise InvalidRequest("too complex")

        def accept(self, token_id: int) -> None:
            del token_id

    engine = text_engine(model_dir)
    request = text_request("bad", 5, 4)
    engine.add(replace(request, sampling=replace(request.sampling, n=3), grammar=Broken(good=True)))
    engine.add(text_request("fine", 5, 4))
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step()
    errors = [output for output in outputs if output.error is not None]
    assert [(output.request_id, type(output.error)) for output in errors] == [("bad", InvalidRequest)]
    assert outputs.index(errors[0]) == max(i for i, output in enumerate(outputs) if output.request_id == "bad")
    assert sum(len(output.token_ids) for output in outputs if output.request_id == "fine") == 4
    assert engine.kv_free_tokens == engine.kv_tokens


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_kv_cache_is_bounded_in_bytes(model_dir: Path) -> None:
    assert text_engine(model_dir, kv_cache_bytes=100 * SLOT_NBYTES + 1, kv=BY_TOKEN).kv_tokens == 100
    in_blocks = text_engine(model_dir, kv_cache_bytes=100 * SLOT_NBYTES)
    assert (in_blocks.kv_tokens, in_blocks.kv_block_tokens) == (96, 16)
    with pytest.raises(ValueError, match="holds no block of 16 tokens"):
        text_engine(model_dir, kv_cache_bytes=SLOT_NBYTES - 1)


def test_a_sequence_without_memory_waits_and_holds_none(model_dir: Path, reference: Reference, make: Make) -> None:
    engine = text_engine(model_dir, kv_cache_bytes=40 * SLOT_NBYTES, kv=BY_TOKEN)
    engine.add(text_request("first", 30, 10))
    question = random_question(random.Random(6), 0)
    assert len(reference.prompt(question)) > 7
    engine.add(make("second", question, greedy(12)))
    (output,) = engine.step()
    assert output.request_id == "first"
    assert engine.kv_free_tokens == 9
    answers = run(engine, [output])
    assert answers["second"] == reference.answer(question, 12)
    assert engine.kv_free_tokens == engine.kv_tokens


def test_a_sequence_waiting_for_memory_is_not_overtaken(model_dir: Path) -> None:
    engine = text_engine(model_dir, kv_cache_bytes=40 * SLOT_NBYTES)
    engine.add(text_request("runs", 20, 10))
    engine.add(text_request("large", 20, 10))
    engine.add(text_request("small", 2, 2))
    first_token: list[str] = []
    while engine.has_work:
        first_token += [o.request_id for o in engine.step() if o.request_id not in first_token]
    assert first_token == ["runs", "large", "small"]


def test_cancelling_frees_memory_at_once(model_dir: Path) -> None:
    engine = text_engine(model_dir, kv_cache_bytes=40 * SLOT_NBYTES, kv=BY_TOKEN)
    engine.add(text_request("runs", 20, 20))
    engine.add(text_request("waits", 20, 20))
    engine.step()
    assert engine.kv_free_tokens == 19
    engine.cancel("runs")
    engine.cancel("unknown")
    assert engine.kv_free_tokens == engine.kv_tokens
    assert engine.pending_tokens == 40
    assert set(run(engine)) == {"waits"}
    assert engine.pending_tokens == 0


def test_random_requests_with_cancellations_leak_no_memory(model_dir: Path) -> None:
    rng = random.Random(7)
    engine = text_engine(model_dir, kv_cache_bytes=96 * SLOT_NBYTES, max_sequences=5, token_budget=24)
    finished: set[str] = set()
    cancelled: set[str] = set()
    for number in range(200):
        engine.add(text_request(str(number), rng.randrange(1, 40), rng.randrange(1, 12)))
        if rng.random() < 0.4:
            victim = str(rng.randrange(number + 1))
            if victim not in finished:
                cancelled.add(victim)
            engine.cancel(victim)
        for _ in range(rng.randrange(4)):
            finished |= {o.request_id for o in engine.step() if o.finish_reason}
    while engine.has_work:
        finished |= {o.request_id for o in engine.step() if o.finish_reason}
    assert finished | cancelled == {str(number) for number in range(200)}
    assert not finished & cancelled
    assert engine.kv_free_tokens == engine.kv_tokens
    engine.add(text_request("all of it", 56, 40))
    assert len(run(engine)["all of it"]) == 40


def test_pending_tokens_counts_the_tokens_left_to_compute(model_dir: Path) -> None:
    engine = text_engine(model_dir, token_budget=16)
    engine.add(text_request("one", 20, 3))
    counts = [engine.pending_tokens]
    while engine.has_work:
        engine.step()
        counts.append(engine.pending_tokens)
    assert counts == [23, 7, 2, 1, 0]


# --- refusals and failures ------------------------------------------------------------------------------------------


def test_a_request_larger_than_the_kv_cache_is_refused(model_dir: Path) -> None:
    engine = text_engine(model_dir, kv_cache_bytes=100 * SLOT_NBYTES, kv=BY_TOKEN)
    with pytest.raises(ContextTooLong, match="512"):
        engine.add(EngineRequest("long", (5,) * 500, (), greedy(13)))
    with pytest.raises(InvalidRequest, match="KV cache of 100"):
        engine.add(EngineRequest("large", (5,) * 90, (), greedy(11)))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("token_ids", "sampling"),
    [
        ((), greedy(1)),
        ((5, 124), greedy(1)),
        ((5, -1), greedy(1)),
        ((5,), greedy(0)),
        ((5,), SamplingParams()),
        ((5, 2), greedy(1)),
    ],
    ids=["empty", "beyond the vocabulary", "negative", "nothing to generate", "no limit", "placeholder without item"],
)
def test_an_invalid_request_is_refused(
    refusing: TransformersTextEngine, token_ids: tuple[int, ...], sampling: SamplingParams
) -> None:
    with pytest.raises(InvalidRequest):
        refusing.add(EngineRequest("bad", token_ids, (), sampling))
    assert not refusing.has_work


def test_the_id_of_a_running_request_is_refused(model_dir: Path) -> None:
    engine = text_engine(model_dir)
    engine.add(text_request("one", 3, 3))
    with pytest.raises(InvalidRequest, match="one"):
        engine.add(text_request("one", 3, 3))


def embeds(tokens: int, value: float = 0.0, **changes: Any) -> dict[str, Tensor]:
    spec = replace(TensorSpec("embeds", DType.F32, (tokens, 64)), **changes)
    data = torch.full((spec.nbytes // 4,), value).numpy().tobytes()
    return {spec.name: Tensor(spec, memoryview(data))}


@pytest.mark.parametrize(
    "given",
    [
        EmbeddingInput(1, 2, embeds(3)),
        EmbeddingInput(0, 3, embeds(3)),
        EmbeddingInput(3, 3, embeds(3)),
        EmbeddingInput(-1, 3, embeds(3)),
        EmbeddingInput(1, 0, embeds(0)),
        EmbeddingInput(1, 3, embeds(3, name="other")),
        EmbeddingInput(1, 3, embeds(3, dtype=DType.I32)),
        EmbeddingInput(1, 3, embeds(3, shape=(64, 3))),
        EmbeddingInput(1, 3, {}),
    ],
    ids=["too short", "too early", "too late", "before", "nothing", "name", "dtype", "shape", "no tensor"],
)
def test_embeddings_that_do_not_match_their_placeholders_are_refused(
    refusing: TransformersTextEngine, given: EmbeddingInput
) -> None:
    with pytest.raises(InvalidRequest):
        refusing.add(EngineRequest("bad", (5, 2, 2, 2, 6), (given,), greedy(1)))


def test_items_may_not_overlap(refusing: TransformersTextEngine) -> None:
    given = (EmbeddingInput(1, 2, embeds(2)), EmbeddingInput(2, 2, embeds(2)))
    with pytest.raises(InvalidRequest):
        refusing.add(EngineRequest("bad", (5, 2, 2, 2, 6), given, greedy(1)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_embeddings_are_refused(refusing: TransformersTextEngine, value: float) -> None:
    request = EngineRequest("bad", (5, 2, 2, 6), (EmbeddingInput(1, 2, embeds(2, value)),), greedy(1))
    with pytest.raises(EngineFailure):
        refusing.add(request)


def test_embeddings_are_copied(model_dir: Path, make: Make, reference: Reference) -> None:
    question = random_question(random.Random(1), 1)
    request = make("one", question, greedy(8))
    memory = [bytearray(item.tensors["embeds"].data) for item in request.embeddings]
    lent = tuple(
        replace(item, tensors={"embeds": replace(item.tensors["embeds"], data=memoryview(buffer))})
        for item, buffer in zip(request.embeddings, memory, strict=True)
    )
    engine = text_engine(model_dir)
    engine.add(replace(request, embeddings=lent))
    for buffer in memory:
        buffer[:] = bytes(len(buffer))
    assert run(engine)["one"] == reference.answer(question, 8)


def break_token(engine: TransformersTextEngine, token: int, monkeypatch: pytest.MonkeyPatch, *, nan: bool) -> None:
    """Makes every forward pass with ``token`` fail, or makes that token's embedding NaN."""
    embed_tokens = engine._adapter.decoder.get_input_embeddings()
    whole = embed_tokens.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = whole(ids)
        if nan:
            return embedded.masked_fill((ids == token)[:, None], float("nan"))
        if (ids == token).any():
            raise RuntimeError("kernel failed")
        return embedded

    monkeypatch.setattr(embed_tokens, "forward", forward)


@pytest.mark.parametrize("nan", [False, True], ids=["the pass fails", "not a number"])
def test_only_the_sequence_that_causes_a_failure_fails(
    model_dir: Path, reference: Reference, make: Make, monkeypatch: pytest.MonkeyPatch, *, nan: bool
) -> None:
    question = random_question(random.Random(1), 1)
    engine = text_engine(model_dir)
    engine.add(make("good", question, greedy(12)))
    outputs = engine.step() + engine.step()
    break_token(engine, 100, monkeypatch, nan=nan)
    engine.add(EngineRequest("bad", (7, 100, 8), (), greedy(4)))
    engine.add(make("also good", question, greedy(12)))
    while engine.has_work:
        outputs += engine.step()
    failed = [output for output in outputs if output.error is not None]
    assert [(output.request_id, output.token_ids) for output in failed] == [("bad", ())]
    assert isinstance(failed[0].error, EngineFailure)
    assert "kernel" not in str(failed[0].error)
    answers = run(engine, [output for output in outputs if output.error is None])
    expected = reference.answer(question, 12)
    assert answers == {"good": expected, "also good": expected}
    assert engine.kv_free_tokens == engine.kv_tokens


def test_a_step_without_work_is_empty(model_dir: Path) -> None:
    engine = text_engine(model_dir)
    assert engine.step() == []
    assert not engine.has_work
