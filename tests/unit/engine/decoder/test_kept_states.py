"""Prompts go on from kept states of earlier ones, token for token as by ``generate``."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.decoder.test_loras import clear, load
from tests.unit.engine.decoder.test_sequence_states import DECODERS, Model, by_choice, run_out, tokens_of
from tests.unit.engine.kv_transfer import access, go_on, prefill
from tests.unit.engine.loras import make_lora, merged
from tests.unit.engine.tiny import Question, engine_request, greedy, make_model, random_image, run
from triptych.domain.engine import EngineRequest
from triptych.engine.decoder import text_engine
from triptych.engine.decoder.per_sequence_runner import PerSequenceModelRunner
from triptych.engine.decoder.sequence_states import SequenceStates, UnknownState
from triptych.engine.decoder.setup import KvOptions, kept_nbytes

BORDER = 8
KV = KvOptions(border_tokens=BORDER)
SHARED_WORDS = 10
TOKENS = 10


@pytest.fixture(scope="module", params=["convolutions", "linear attention", "both in one layer"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_model(tmp_path_factory.mktemp("states"), text=DECODERS[request.param]()))


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_model(tmp_path_factory.mktemp("states"), text=DECODERS["convolutions"]()))


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(100)}" for _ in range(count))


def questions(model: Model, *, image_seed: int = 0, shared_words: int = SHARED_WORDS) -> Iterator[Question]:
    """Clear ones about one image, with the same words after it, and others at their ends."""
    rng = random.Random(1)
    shared = f"{words(rng, 3)} <image> {words(rng, shared_words)}"
    image = random_image(random.Random(image_seed), 40, 30)
    while True:
        question = Question(f"{shared} {words(rng, rng.randrange(9, 14))}", (image,))
        try:
            model.reference.answer(question, TOKENS, ignore_eos=True)
        except AssertionError:
            continue
        yield question


def asked(model: Model, name: str, question: Question) -> tuple[EngineRequest, list[int]]:
    """The request, and its answer."""
    sampling = greedy(TOKENS, ignore_eos=True)
    request = engine_request(name, question, model.reference, model._encoder, sampling)
    return request, model.reference.answer(question, TOKENS, ignore_eos=True)


def last_border(tokens: int) -> int:
    return (tokens - 1) // BORDER * BORDER


def ask(engine: Any, model: Model, name: str, question: Question) -> tuple[int, int]:
    """Tokens of the prompt, and those of them that were cached."""
    request, expected = asked(model, name, question)
    engine.add(request)
    outputs = run_out(engine)
    assert tokens_of(outputs, name) == expected
    return len(request.token_ids), outputs[0].cached_tokens


def test_prompts_that_share_an_image_and_words_go_on_from_where_they_part(model: Model) -> None:
    """Borders need not be at those of blocks."""
    engine = model.engine(kv=replace(KV, block_tokens=3))
    source = questions(model)
    first, second, third = (next(source) for _ in range(3))
    tokens, cached = ask(engine, model, "first", first)
    assert cached == 0
    assert ask(engine, model, "again", first) == (tokens, last_border(tokens))
    assert ask(engine, model, "second", second)[1] == 0, "nothing is kept where it leaves the first"
    assert ask(engine, model, "third", third)[1] == (3 + 16 + SHARED_WORDS) // BORDER * BORDER
    assert engine.prefix_hits_tokens > 0
    other = next(questions(model, image_seed=1))
    assert ask(engine, model, "another image", other)[1] == 0


@pytest.mark.slow
def test_many_at_once_answer_as_alone_amid_preemptions(model: Model) -> None:
    """Two prompts fit side by side, and their answers do not. States are kept while one runs alone."""
    source = questions(model)
    pairs = {name: asked(model, name, next(source)) for name in "abcd"}
    kv = replace(KV, block_tokens=1)
    large = model.engine(kv=kv)
    longest = max(len(request.token_ids) for request, _ in pairs.values())
    tokens = 2 * (longest + large._made.fixed_blocks) + TOKENS
    engine = model.engine(kv=kv, kv_cache_bytes=tokens * (4 << 20) // large.kv_tokens)
    for turn, names in (("new", "abcd"), ("alone", "a"), ("again", "abcd")):
        for name in names:
            engine.add(replace(pairs[name][0], request_id=f"{turn} {name}"))
        assert run(engine) == {f"{turn} {name}": pairs[name][1] for name in names}
        assert engine.preemptions > 0
    assert engine.prefix_hits_tokens > 0


@pytest.mark.slow
def test_a_prompt_with_a_kept_state_is_transferred_whole(model: Model) -> None:
    source, target = model.engine(kv=KV), model.engine(kv=KV)
    request, expected = asked(model, "one", next(questions(model)))
    for name, cached in (("one", 0), ("again", last_border(len(request.token_ids)))):
        renamed = replace(request, request_id=name)
        begun, packed = prefill(source, renamed)
        assert begun[0].cached_tokens == cached
        tokens = tokens_of(begun, name)
        outputs = go_on(target, renamed, {0: tokens}, {0: packed})
        assert access(target).computed(name, 0) == len(request.token_ids)
        assert tokens + run(target, outputs)[name] == expected


def test_drawn_choices_are_the_same_after_a_kept_state(convolutions: Model) -> None:
    engine = convolutions.engine(kv=KV)
    request, _ = asked(convolutions, "new", next(questions(convolutions)))
    request = replace(request, sampling=replace(request.sampling, temperature=0.8, seed=7, n=2))
    answers = []
    for name in ("new", "again"):
        engine.add(replace(request, request_id=name))
        answers.append(by_choice(run_out(engine)))
    assert answers[0] == answers[1]
    assert engine.prefix_hits_tokens == last_border(len(request.token_ids))


def test_states_of_a_gpu_take_a_bounded_part_of_host_memory() -> None:
    assert kept_nbytes(80 << 30, torch.device("cuda")) == 4 << 30
    assert kept_nbytes(1 << 30, torch.device("cuda")) == 1 << 30
    assert kept_nbytes(80 << 30, torch.device("cpu")) == 80 << 30


@pytest.mark.parametrize("harmed", ["raises", "refuses"])
def test_a_request_whose_state_cannot_be_loaded_is_computed_whole_beside_others(
    convolutions: Model, monkeypatch: pytest.MonkeyPatch, harmed: str
) -> None:
    engine, source = convolutions.engine(kv=KV), questions(convolutions)
    question = next(source)
    ask(engine, convolutions, "new", question)

    def load(*_: Any) -> bool:
        if harmed == "raises":
            raise RuntimeError("out of memory")
        return False

    pairs = {"again": asked(convolutions, "again", question), "other": asked(convolutions, "other", next(source))}
    with monkeypatch.context() as patched:
        patched.setattr(SequenceStates, "load", load)
        for request, _ in pairs.values():
            engine.add(request)
        outputs = run_out(engine)
    for name, (_, expected) in pairs.items():
        assert tokens_of(outputs, name) == expected
    assert not any(output.cached_tokens for output in outputs)
    assert engine.prefix_hits_tokens == 0
    assert ask(engine, convolutions, "later", question)[1] > 0


def test_a_request_whose_state_cannot_be_copied_out_goes_on_beside_others(
    convolutions: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, source = convolutions.engine(kv=KV), questions(convolutions)
    pairs = {name: (question := next(source), asked(convolutions, name, question)) for name in ("one", "other")}
    export = SequenceStates.export

    def fail_for_one(states: SequenceStates, sequence_id: str, positions: int, memory: memoryview) -> None:
        if sequence_id == "one/0":
            raise RuntimeError("out of memory")
        export(states, sequence_id, positions, memory)

    monkeypatch.setattr(SequenceStates, "export", fail_for_one)
    for _, (request, _) in pairs.values():
        engine.add(request)
    outputs = run_out(engine)
    for name, (_, (_, expected)) in pairs.items():
        assert tokens_of(outputs, name) == expected
    assert ask(engine, convolutions, "other again", pairs["other"][0])[1] > 0


def test_nothing_is_kept_any_more_once_a_state_is_unknown(
    convolutions: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, source = convolutions.engine(kv=KV), questions(convolutions)
    ask(engine, convolutions, "kept", next(source))

    def export(*_: Any) -> None:
        raise UnknownState("the cache is built differently")

    monkeypatch.setattr(SequenceStates, "export", export)
    for name in ("second", "third"):
        assert ask(engine, convolutions, name, next(source))[1] == 0
    assert len(caplog.records) == 1
    assert engine._batch.kept is not None
    assert engine._batch.kept.held_nbytes == 0


def test_states_are_forgotten_and_their_memory_is_given_back_when_the_model_is_unloaded(
    convolutions: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, question = convolutions.engine(kv=KV, can_unload=True), next(questions(convolutions))
    tokens, _ = ask(engine, convolutions, "new", question)
    weights, kept = engine.weights, engine._batch.kept
    assert weights is not None
    assert kept is not None
    assert kept.held_nbytes > 0
    held = list[int]()
    monkeypatch.setattr(text_engine, "trim", lambda: held.append(kept.held_nbytes))
    weights.before_unload()
    weights.unload()
    assert held == [0], "trimmed once all are gone"
    weights.load()
    weights.after_load()
    assert ask(engine, convolutions, "again", question) == (tokens, 0)


def test_borders_are_64_tokens_apart_by_default(convolutions: Model) -> None:
    engine = convolutions.engine()
    question = next(questions(convolutions, shared_words=120))
    tokens, _ = ask(engine, convolutions, "new", question)
    assert ask(engine, convolutions, "again", question) == (tokens, 128)
    assert 128 < tokens < 192


def test_a_state_of_one_adapter_is_used_by_no_other(convolutions: Model, tmp_path: Path) -> None:
    directory = make_lora(
        tmp_path / "lora",
        convolutions.reference.model.model.language_model,
        seed=1,
        targets=("q_proj", "in_proj", "w2"),
    )
    engine, whole = convolutions.engine(kv=KV), merged(convolutions.directory, directory)
    digest = load(engine, directory)
    question = clear([convolutions.reference, whole], images=1, seed=3)
    for turn, cached in (("new", False), ("again", True)):
        for reference, lora in ((convolutions.reference, ""), (whole, digest)):
            name = f"{turn} {lora}"
            request = engine_request(name, question, reference, convolutions._encoder, greedy(TOKENS, ignore_eos=True))
            engine.add(replace(request, lora=lora))
            outputs = run_out(engine)
            assert tokens_of(outputs, name)[:6] == reference.answer(question, 6, ignore_eos=True)
            assert bool(outputs[0].cached_tokens) is cached


@pytest.mark.parametrize("tail", [2, 3, 4])
@pytest.mark.parametrize("after", [False, True])
def test_a_decoder_that_does_not_go_on_by_several_tokens_keeps_nothing(
    convolutions: Model, monkeypatch: pytest.MonkeyPatch, tail: int, after: bool
) -> None:
    """What it yields is wrong, or the state that it leaves."""
    probe = PerSequenceModelRunner.probe
    tails: dict[str, int] = {}

    def harmed(runner: PerSequenceModelRunner, sequence_id: str, prompt: Any, first: int = 0) -> Any:
        before, tails[sequence_id] = tails.get(sequence_id, 0), len(prompt) - first if first else 0
        return probe(runner, sequence_id, prompt, first) + ((before if after else tails[sequence_id]) == tail)

    monkeypatch.setattr(PerSequenceModelRunner, "probe", harmed)
    engine = convolutions.engine(kv=KV)
    assert engine.kv is not None
    assert not engine.finds_prefixes
    for name in ("new", "again"):
        assert ask(engine, convolutions, name, next(questions(convolutions)))[1] == 0
