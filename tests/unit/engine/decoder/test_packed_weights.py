import random
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.engine.tiny import Reference, engine_request, greedy, random_question, run, text_engine
from triptych.engine.decoder import packed_weights
from triptych.engine.decoder.packed_weights import pack
from triptych.engine.encoder import TransformersEncoderEngine


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 128, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 2, 3, 32, 33, 700])
def test_packing_does_not_change_products(rows: int) -> None:
    plain, packed = layers(), layers()
    pack(packed, most_nbytes=1 << 20, least_nbytes=0)
    hidden = torch.randn(1, rows, 64)
    with torch.inference_mode():
        assert torch.allclose(packed(hidden), plain(hidden), atol=1e-5)
        assert torch.allclose(packed(hidden[0]), plain(hidden[0]), atol=1e-5)
    assert packed.state_dict().keys() == plain.state_dict().keys()


def test_the_largest_weights_are_packed_first_within_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = 64 * 96 * 4, 96 * 128 * 4
    monkeypatch.setattr(packed_weights, "_has_kernel", lambda: True)
    assert pack(layers(), most_nbytes=small + large, least_nbytes=0) == small + large
    assert pack(layers(), most_nbytes=small + large - 1, least_nbytes=0) == large
    assert pack(layers(), most_nbytes=large - 1, least_nbytes=0) == small
    assert pack(layers(), most_nbytes=0, least_nbytes=0) == 0
    assert pack(layers(), most_nbytes=1 << 20) == 0
    assert pack(layers().to(torch.bfloat16), most_nbytes=1 << 20, least_nbytes=0) == 0
    monkeypatch.setattr(packed_weights, "_has_kernel", lambda: False)
    assert pack(layers(), most_nbytes=1 << 20, least_nbytes=0) == 0


def test_answers_equal_generate(
    model_dir: Path, reference: Reference, encoder: TransformersEncoderEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "triptych.engine.decoder.text_engine.pack",
        lambda model, *, most_nbytes: pack(model, most_nbytes=most_nbytes, least_nbytes=0),
    )
    engine = text_engine(model_dir, max_sequences=4)
    questions = {f"r{seed}": random_question(random.Random(seed), seed % 3) for seed in range(4)}
    for name, question in questions.items():
        engine.add(engine_request(name, question, reference, encoder, greedy(12)))
    assert run(engine) == {name: reference.answer(question, 12) for name, question in questions.items()}
