import random
from collections.abc import Sequence
from functools import partial
from itertools import product as pairs
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.engine.tiny import Reference, encoder_engine, engine_request, greedy, random_question, run, text_engine
from triptych.engine import fastest_products
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.engine.fastest_products import ROWS, choose_products, fastest
from triptych.engine.joined_layers import JoinedLinear
from triptych.engine.linear_products import By, OneDnnProduct, PackedProduct
from triptych.engine.product_times import Alike, Times
from triptych.engine.worker_threads import WorkerThreads

PACKED, COMPILED, PLAIN, ONEDNN = ((by,) * len(ROWS) for by in (By.PACKED, By.COMPILED, By.PLAIN, By.ONEDNN))
MIXED = (By.COMPILED, By.PACKED, By.PLAIN, By.ONEDNN, By.PACKED, By.PLAIN, By.PACKED, By.ONEDNN)
SMALL, LARGE = 64 * 96 * 4, 96 * 128 * 4
ONE = WorkerThreads(1)


@pytest.fixture(autouse=True)
def no_layer_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest_products, "LEAST_NBYTES", 0)
    monkeypatch.setattr(fastest_products, "LEAST_PACKED_NBYTES", 0)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 128, bias=False)).requires_grad_(False)


class Measured:
    """Times by which ``chosen`` are the fastest, and what was to be measured."""

    def __init__(self, chosen: Sequence[By]) -> None:
        self.asked: list[tuple[tuple[int, ...], int, set[By]]] = []
        self.rows: Sequence[int] = ()
        self._chosen = chosen

    def __call__(self, shapes: Sequence[Alike], row_counts: Sequence[int]) -> list[list[Times]]:
        self.asked = [
            ((shape.layers[0].out_features, shape.layers[0].in_features), len(shape.layers), set(shape.makes))
            for shape in shapes
        ]
        self.rows = row_counts
        chosen = self._chosen[len(ROWS) - len(row_counts) :]
        return [[{by: 1.0 + (by is not fast) for by in shape.makes} for fast in chosen] for shape in shapes]


@pytest.mark.parametrize(
    ("rows", "chosen"), list(pairs([1, 2, 3, 8, 12, 32, 33, 700, 1025, 3000], [PACKED, COMPILED, ONEDNN, MIXED]))
)
def test_products_are_the_same(rows: int, chosen: Sequence[By]) -> None:
    plain, other = layers(), layers()
    taken = choose_products(other, most_packed_nbytes=1 << 20, threads=ONE, measure=Measured(chosen))
    assert taken == (SMALL + LARGE) * (By.PACKED in chosen)
    hidden = torch.randn(1, rows, 64)
    with torch.inference_mode():
        assert torch.allclose(other(hidden), plain(hidden), atol=1e-5)
        assert torch.allclose(other(hidden[0]), plain(hidden[0]), atol=1e-5)
    assert other.state_dict().keys() == plain.state_dict().keys()


def test_the_largest_weights_are_packed_first_within_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest_products, "has_onednn", lambda: True)
    choose = partial(choose_products, measure=Measured(PACKED))
    assert choose(layers(), most_packed_nbytes=SMALL + LARGE) == SMALL + LARGE
    assert choose(layers(), most_packed_nbytes=SMALL + LARGE - 1) == LARGE
    assert choose(layers(), most_packed_nbytes=LARGE - 1) == SMALL
    assert choose(layers(), most_packed_nbytes=0) == 0
    assert choose(layers().to(torch.bfloat16), most_packed_nbytes=1 << 20) == 0
    alike = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    assert choose(alike, most_packed_nbytes=3 * 64 * 64 * 4) == 3 * 64 * 64 * 4
    assert ["forward" in vars(layer) for layer in alike] == [True, True, True, False]
    monkeypatch.setattr(fastest_products, "LEAST_PACKED_NBYTES", LARGE + 1)
    assert choose(layers(), most_packed_nbytes=1 << 20) == 0
    monkeypatch.setattr(fastest_products, "has_onednn", lambda: False)
    assert choose(layers(), most_packed_nbytes=1 << 20) == 0


def test_layers_that_are_not_packed_compute_by_the_fastest_other_product() -> None:
    alike = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).requires_grad_(False)
    times_s = {By.PLAIN: 3.0, By.ONEDNN: 2.0, By.PACKED: 1.0}
    choose_products(alike, most_packed_nbytes=64 * 64 * 4, measure=lambda _, rows: [[times_s for _ in rows]])
    kinds = [[type(product) for product in vars(layer)["forward"].products.values()] for layer in alike]
    assert kinds == [[PackedProduct], [OneDnnProduct]]


def test_another_product_than_the_plain_one_must_be_worthwhile() -> None:
    assert fastest({By.PLAIN: 1.0, By.ONEDNN: 0.96}) is By.PLAIN
    assert fastest({By.PLAIN: 1.0, By.ONEDNN: 0.94}) is By.ONEDNN
    assert fastest({By.PLAIN: 1.0, By.ONEDNN: 0.94, By.PACKED: 0.9}) is By.PACKED
    assert fastest({By.PLAIN: 1.0, By.ONEDNN: 0.94, By.PACKED: 0.9}, copied=False) is By.ONEDNN


def test_all_shapes_are_measured_together_and_layers_stay_plain_where_that_is_fastest() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 32)).requires_grad_(False)
    measure = Measured(PLAIN)
    assert choose_products(model, most_packed_nbytes=1 << 20, threads=ONE, measure=measure) == 0
    every = set(By) - {By.JOINED}
    assert measure.asked == [((64, 64), 4, every), ((32, 64), 1, every)]
    assert not any("forward" in vars(layer) for layer in model)


def test_no_more_is_packed_to_measure_it_than_there_is_memory_for() -> None:
    alike = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    measure = Measured(PLAIN)
    choose_products(alike, most_packed_nbytes=2 * 64 * 64 * 4, measure=measure)
    assert measure.asked == [((64, 64), 2, {By.PLAIN, By.ONEDNN, By.PACKED})]


def test_without_memory_for_packed_weights_the_other_products_are_measured() -> None:
    model, measure = layers(), Measured(ONEDNN)
    assert choose_products(model, most_packed_nbytes=0, threads=ONE, measure=measure) == 0
    assert [makes for _, _, makes in measure.asked] == [{By.PLAIN, By.ONEDNN, By.COMPILED}] * 2
    hidden = torch.randn(5, 64)
    assert torch.allclose(model(hidden), layers()(hidden), atol=1e-5)


def test_small_layers_are_not_packed_and_the_smallest_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest_products, "LEAST_PACKED_NBYTES", LARGE + 1)
    monkeypatch.setattr(fastest_products, "LEAST_NBYTES", SMALL + 1)
    measure = Measured(COMPILED)
    choose_products(layers(), most_packed_nbytes=1 << 20, threads=ONE, measure=measure)
    assert measure.asked == [((128, 96), 1, {By.PLAIN, By.ONEDNN, By.COMPILED})]


def test_small_joined_layers_are_copied_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest_products, "LEAST_PACKED_NBYTES", LARGE + 1)
    parts = [nn.Linear(64, outputs).requires_grad_(False) for outputs in (96, 32)]
    joined, measure = JoinedLinear(parts), Measured([By.JOINED] * len(ROWS))
    taken = choose_products(
        nn.ModuleList([*parts, joined]), most_packed_nbytes=1 << 20, without=parts, threads=ONE, measure=measure
    )
    assert measure.asked == [((128, 64), 1, {By.PLAIN, By.ONEDNN, By.COMPILED, By.JOINED})]
    assert taken == 64 * 128 * 4
    hidden = torch.randn(5, 64)
    assert torch.allclose(joined(hidden), torch.cat([part(hidden) for part in parts], 1), atol=1e-5)
    choose_products(nn.ModuleList([*parts, joined]), most_packed_nbytes=0, without=parts, threads=ONE, measure=measure)
    assert measure.asked == [((128, 64), 1, {By.PLAIN, By.ONEDNN, By.COMPILED})]


def test_an_encoder_has_too_many_rows_for_compiled_products() -> None:
    measure = Measured(PLAIN)
    choose_products(layers(), most_packed_nbytes=1 << 20, threads=ONE, least_rows=33, measure=measure)
    assert {by for _, _, makes in measure.asked for by in makes} == {By.PLAIN, By.ONEDNN, By.PACKED}
    assert list(measure.rows) == [32, 128, 512]


def test_answers_equal_generate(
    model_dir: Path, reference: Reference, encoder: TransformersEncoderEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen in (PACKED, COMPILED, ONEDNN, MIXED):
        monkeypatch.setattr(fastest_products, "product_times_s", Measured(chosen))
        engine, packed_encoder = text_engine(model_dir, max_sequences=4), encoder_engine(model_dir)
        questions = {f"r{seed}": random_question(random.Random(seed), seed % 3) for seed in range(4)}
        for name, question in questions.items():
            engine.add(engine_request(name, question, reference, packed_encoder, greedy(12)))
        assert run(engine) == {name: reference.answer(question, 12) for name, question in questions.items()}
