"""Encoder and decoder in one process: files are read once, and results equal those of separate processes."""

import random
from hashlib import file_digest
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.unit.engine.tiny import (
    Reference,
    encoder_engine,
    engine_request,
    greedy,
    info_of,
    parameter_nbytes,
    random_image,
    random_question,
    text_engine,
)
from triptych.engine import checkpoint as checkpoint_module
from triptych.engine import encoder as encoder_module
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.decoder import text_engine as text_module
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.engine.weight_loading import load_part


def test_encoder_and_decoder_share_one_model_and_files_are_hashed_once(
    model_dir: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[PreTrainedModel] = []
    hashed: list[str] = []

    def noting(*args: Any, **kwargs: Any) -> PreTrainedModel:
        loaded.append(load_part(*args, **kwargs))
        return loaded[-1]

    def noted(file: Any, name: Any) -> Any:
        hashed.append(file.name)
        return file_digest(file, name)

    for module in (encoder_module, text_module):
        monkeypatch.setattr(module, "load_part", noting)
    monkeypatch.setattr(checkpoint_module, "file_digest", noted)
    whole = open_checkpoint(model_dir)
    encoder = encoder_engine(whole)
    text = text_engine(whole, kv_cache_bytes=1 << 20, max_sequences=4, token_budget=16, packed_weight_bytes=0)
    assert text.model == encoder.model
    assert sum(map(parameter_nbytes, loaded)) == parameter_nbytes(reference.model)
    assert len(hashed) == len(set(hashed)) > 3


def test_answers_do_not_depend_on_encodes_between_steps_or_delayed_prefills(
    model_dir: Path, reference: Reference, encoder: TransformersEncoderEngine
) -> None:
    rng = random.Random(3)
    questions = {f"q{number}": random_question(rng, number % 3) for number in range(6)}
    engine = text_engine(model_dir, kv_cache_bytes=4 << 20, max_sequences=16, token_budget=24)
    pending = dict(questions)
    others = [encoder.prepare(media, info_of(media)) for media in (random_image(rng, 30, 20) for _ in range(3))]
    answers: dict[str, list[int]] = {}
    held_back = 0
    while pending or engine.has_work:
        if pending and rng.random() < 0.4:
            name = next(iter(pending))
            engine.add(engine_request(name, pending.pop(name), reference, encoder, greedy(12, ignore_eos=True)))
        if rng.random() < 0.5:
            held_back += engine.prefill_queue_position is not None
            decoding = {name for name, tokens in answers.items() if 0 < len(tokens) < 12}
            outputs = engine.decode_step()
            assert {output.request_id for output in outputs} == decoding, "every decode continues, and no prefill"
            encoder.encode(others)
        else:
            outputs = engine.step()
        for output in outputs:
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert held_back > 3
    for name, question in questions.items():
        assert answers[name] == reference.answer(question, 12, ignore_eos=True), name


def test_a_full_decode_is_timed_before_anything_runs(model_dir: Path) -> None:
    engine = text_engine(model_dir, kv_cache_bytes=1 << 20, max_sequences=16, token_budget=64)
    assert 0 < engine.full_decode_s() < 5
    assert engine.kv_free_tokens == engine.kv_tokens
