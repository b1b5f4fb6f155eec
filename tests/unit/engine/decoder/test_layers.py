"""Decoders with layers other than full attention, against ``generate``: windows, bidirectional spans, other layers."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.tiny import (
    Reference,
    encoder_engine,
    engine_request,
    greedy,
    make_model,
    random_question,
    run,
    text_config,
    text_engine,
    transformers,
)
from triptych.engine.decoder.attention import Chunk, Context
from triptych.engine.decoder.packed_runner import PackedModelRunner
from triptych.engine.decoder.per_sequence_runner import PerSequenceModelRunner
from triptych.engine.decoder.setup import KvOptions
from triptych.errors import EngineFailure
from triptych.families.base import Span
from triptych.families.model_files import BadModel

WINDOW = 12
TURN = 22
"""Positions beyond which rotary frequencies are others: between the lengths of prompts with and without images."""
DECODERS: dict[str, Any] = {
    "every layer": lambda: text_config(transformers.MistralConfig, sliding_window=WINDOW),
    "some layers": lambda: text_config(
        transformers.Qwen2Config,
        sliding_window=WINDOW,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "convolutions": lambda: text_config(
        transformers.Lfm2Config,
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "long frequencies": lambda: text_config(
        transformers.Phi3Config,
        original_max_position_embeddings=TURN,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": TURN,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0],
        },
    ),
}


@pytest.fixture(scope="module", params=DECODERS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("layers"), text=DECODERS[request.param]())


@pytest.mark.slow
@pytest.mark.parametrize("kv", [KvOptions(4, contiguous=True), KvOptions(4, contiguous=False)], ids=["run", "pieces"])
def test_answers_equal_generate(directory: Path, kv: KvOptions) -> None:
    """All together, in chunks, and again with cached prefixes."""
    reference = Reference(directory)
    encoder = encoder_engine(directory)
    questions = {f"r{seed}": random_question(random.Random(seed), seed % 3) for seed in range(4)}
    expected = {name: reference.answer(question, 16, ignore_eos=True) for name, question in questions.items()}
    whole = text_engine(directory, kv=kv)
    small = text_engine(directory, kv=kv, max_sequences=3, token_budget=16)
    for engine in (whole, small, whole):
        for name, question in questions.items():
            engine.add(engine_request(name, question, reference, encoder, greedy(16, ignore_eos=True)))
        assert run(engine) == expected
        assert engine.kv_free_tokens == engine.kv_tokens


@pytest.mark.slow
def test_preempted_sequences_give_the_same_answers(directory: Path) -> None:
    """From copies, but for layers whose state is not in blocks: these are recomputed."""
    reference = Reference(directory)
    encoder = encoder_engine(directory)
    questions = {f"r{seed}": random_question(random.Random(seed), seed % 3) for seed in range(1, 6)}
    size = text_engine(directory).kv_tokens
    engine = text_engine(directory, kv_cache_bytes=(4 << 20) * 90 // size, kv=KvOptions(4))
    for name, question in questions.items():
        engine.add(engine_request(name, question, reference, encoder, greedy(24, ignore_eos=True)))
    assert run(engine) == {
        name: reference.answer(question, 24, ignore_eos=True) for name, question in questions.items()
    }
    assert engine.preemptions
    assert bool(engine.kv_copies.back) == isinstance(engine._runner, PackedModelRunner)
    assert engine.kv_copies.held_bytes == 0


@pytest.mark.slow
def test_what_is_recomputed_of_an_answer_has_the_frequencies_that_it_began_with(tmp_path: Path) -> None:
    """Those of its prompt, also where the answer goes beyond the turn."""
    directory = make_model(tmp_path, text=DECODERS["long frequencies"]())
    reference = Reference(directory)
    encoder = encoder_engine(directory)
    questions = {f"r{seed}": random_question(random.Random(seed), 0) for seed in range(6)}
    size = text_engine(directory).kv_tokens
    engine = text_engine(directory, kv_cache_bytes=(4 << 20) * 90 // size, kv=KvOptions(4))
    for name, question in questions.items():
        engine.add(engine_request(name, question, reference, encoder, greedy(24, ignore_eos=True)))
    assert run(engine) == {
        name: reference.answer(question, 24, ignore_eos=True) for name, question in questions.items()
    }
    assert engine.preemptions


def test_state_outside_of_blocks_is_not_copied_to_host_memory(tmp_path: Path) -> None:
    directory = make_model(tmp_path, text=DECODERS["convolutions"]())
    with pytest.raises(BadModel, match=r"preempted_kv_bytes is 4096: .*'conv', 'full_attention'"):
        text_engine(directory, preempted_kv_bytes=4096)


@pytest.mark.slow
def test_other_layers_keep_one_cache_per_running_sequence(tmp_path: Path) -> None:
    directory = make_model(tmp_path, text=DECODERS["convolutions"]())
    reference = Reference(directory)
    encoder = encoder_engine(directory)
    questions = {f"r{seed}": random_question(random.Random(seed), seed % 2) for seed in range(5)}
    whole = text_engine(directory)
    assert isinstance(whole._runner, PerSequenceModelRunner)
    token, fixed = whole._runner.cache_nbytes(range(40))
    assert (token, fixed) == (2 * 2 * 16 * 4, 2 * 64 * 3 * 4)
    engine = text_engine(directory, kv_cache_bytes=16 * 16 * token, token_budget=16)
    for name, question in questions.items():
        engine.add(engine_request(name, question, reference, encoder, greedy(20, ignore_eos=True)))
    outputs = []
    most = 0
    assert isinstance(engine._runner, PerSequenceModelRunner)
    while engine.has_work:
        outputs += engine.step()
        most = max(most, len(engine._runner._caches))
    assert run(engine, outputs) == {
        name: reference.answer(question, 20, ignore_eos=True) for name, question in questions.items()
    }
    assert engine.preemptions
    assert 1 < most <= 5
    assert len(engine._runner._caches) == 0
    assert engine.prefix_hits_tokens == 0


def test_choices_share_the_cache_of_the_prompt(tmp_path: Path) -> None:
    directory = make_model(tmp_path, text=DECODERS["convolutions"]())
    reference = Reference(directory)
    question = random_question(random.Random(3), 0)
    encoder = encoder_engine(directory)
    engine = text_engine(directory)
    sampling = replace(greedy(8, ignore_eos=True), n=3)
    engine.add(engine_request("one", question, reference, encoder, sampling))
    told: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            told.setdefault(output.choice, []).extend(output.token_ids)
    expected = reference.answer(question, 8, ignore_eos=True)
    assert told == {0: expected, 1: expected, 2: expected}


def test_an_unsupported_decoder_is_refused_at_start(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "triptych.engine.decoder.packed_runner.PackedModelRunner.run",
        lambda *_: [EngineFailure("the engine failed on this request")],
    )
    with pytest.raises(BadModel, match="first pass"):
        text_engine(model_dir)


@pytest.mark.parametrize("first", [0, 3, 6])
@pytest.mark.parametrize("window", [None, 4])
def test_masks_are_causal_within_a_window_and_bidirectional_within_a_span(first: int, window: int | None) -> None:
    length, run_ = 14, Span(6, 5)
    chunk = Chunk(0, length - first, Context(length, (0,), is_contiguous=True), (run_,))
    mask = chunk.mask(window, torch.zeros(1))
    assert mask is not None
    oldest = chunk.oldest(window)
    for row in range(first, length):
        for column in range(oldest, length):
            both = {row, column} <= set(range(6, 11))
            seen = (column <= row or both) and (window is None or column > row - window)
            assert bool(mask[row - first, column - oldest] == 0) == seen
