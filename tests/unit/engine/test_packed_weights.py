import random
from collections.abc import Sequence
from itertools import product as pairs
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.engine.tiny import Reference, encoder_engine, engine_request, greedy, random_question, run, text_engine
from triptych.engine import packed_weights
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.engine.packed_weights import Product, faster_packed, pack

ALWAYS, NEVER = (True,) * 5, (False,) * 5
SMALL, LARGE = 64 * 96 * 4, 96 * 128 * 4


@pytest.fixture(autouse=True)
def no_layer_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_NBYTES", 0)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 128, bias=False)).requires_grad_(False)


class Chosen:
    """Answers instead of measurements, and notes the shapes asked for."""

    def __init__(self, faster: Sequence[bool]) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._faster = faster

    def __call__(self, layer: nn.Linear, packed: Product, least_rows: int) -> Sequence[bool]:
        self.shapes.append(tuple(layer.weight.shape))
        return self._faster


@pytest.mark.parametrize(
    ("rows", "faster"),
    list(pairs([1, 2, 3, 32, 33, 700, 1025, 3000], [ALWAYS, (False, True, False, True, True)])),
)
def test_packing_does_not_change_products(rows: int, faster: Sequence[bool]) -> None:
    plain, packed = layers(), layers()
    assert pack(packed, most_nbytes=1 << 20, choose=Chosen(faster)) == SMALL + LARGE
    hidden = torch.randn(1, rows, 64)
    with torch.inference_mode():
        assert torch.allclose(packed(hidden), plain(hidden), atol=1e-5)
        assert torch.allclose(packed(hidden[0]), plain(hidden[0]), atol=1e-5)
    assert packed.state_dict().keys() == plain.state_dict().keys()


def test_the_largest_weights_are_packed_first_within_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "_has_kernel", lambda: True)
    always = Chosen(ALWAYS)
    assert pack(layers(), most_nbytes=SMALL + LARGE, choose=always) == SMALL + LARGE
    assert pack(layers(), most_nbytes=SMALL + LARGE - 1, choose=always) == LARGE
    assert pack(layers(), most_nbytes=LARGE - 1, choose=always) == SMALL
    assert pack(layers(), most_nbytes=0, choose=always) == 0
    assert pack(layers().to(torch.bfloat16), most_nbytes=1 << 20, choose=always) == 0
    monkeypatch.setattr(packed_weights, "LEAST_NBYTES", LARGE + 1)
    assert pack(layers(), most_nbytes=1 << 20, choose=always) == 0
    monkeypatch.setattr(packed_weights, "_has_kernel", lambda: False)
    assert pack(layers(), most_nbytes=1 << 20, choose=always) == 0


def test_layers_of_one_shape_are_measured_once_and_take_no_memory_where_packing_is_not_faster() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 32)).requires_grad_(False)
    never = Chosen(NEVER)
    assert pack(model, most_nbytes=1 << 20, choose=never) == 0
    assert never.shapes == [(64, 64), (32, 64)]
    assert not any("forward" in vars(layer) for layer in model)


def test_what_is_faster_is_measured_for_the_rows_that_matter() -> None:
    layer = nn.Linear(512, 128).requires_grad_(False)
    calls: list[int] = []

    def slow(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        made: torch.Tensor = torch.linalg.matrix_power(torch.eye(256) * 0.5, 40)
        return made

    def fast(rows: torch.Tensor) -> torch.Tensor:
        return rows

    assert not any(faster_packed(layer, slow, least_rows=1))
    assert set(calls) == {1, 8, 32, 128, 512}
    assert faster_packed(layer, fast, least_rows=33) == [False, False, True, True, True]


def test_of_large_products_a_part_is_measured() -> None:
    def never_called(rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError("of all outputs")

    assert len(faster_packed(nn.Linear(4096, 4096).requires_grad_(False), never_called, least_rows=65)) == len(ALWAYS)


def test_answers_equal_generate(
    model_dir: Path, reference: Reference, encoder: TransformersEncoderEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "faster_packed", Chosen(ALWAYS))
    engine, packed_encoder = text_engine(model_dir, max_sequences=4), encoder_engine(model_dir)
    questions = {f"r{seed}": random_question(random.Random(seed), seed % 3) for seed in range(4)}
    for name, question in questions.items():
        engine.add(engine_request(name, question, reference, packed_encoder, greedy(12)))
    assert run(engine) == {name: reference.answer(question, 12) for name, question in questions.items()}
