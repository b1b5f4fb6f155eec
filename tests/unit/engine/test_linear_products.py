import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product as pairs
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.engine.tiny import Reference, encoder_engine, engine_request, greedy, random_question, run, text_engine
from triptych.engine import linear_products
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.engine.joined_layers import Layer
from triptych.engine.linear_products import ROWS, By, CompiledProduct, Make, Product, choose_products, fastest
from triptych.engine.worker_threads import WorkerThreads

PACKED, COMPILED, PLAIN, ONEDNN = ((by,) * len(ROWS) for by in (By.PACKED, By.COMPILED, By.PLAIN, By.ONEDNN))
MIXED = (By.COMPILED, By.PACKED, By.PLAIN, By.ONEDNN, By.PACKED, By.PLAIN, By.PACKED, By.ONEDNN)
SMALL, LARGE = 64 * 96 * 4, 96 * 128 * 4
ONE = WorkerThreads(1)


@pytest.fixture(autouse=True)
def no_layer_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_products, "LEAST_NBYTES", 0)
    monkeypatch.setattr(linear_products, "LEAST_PACKED_NBYTES", 0)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 128, bias=False)).requires_grad_(False)


class Chosen:
    """Answers instead of measurements, and notes what it was asked for."""

    def __init__(self, chosen: Sequence[By]) -> None:
        self.asked: list[tuple[tuple[int, ...], int, set[By]]] = []
        self._chosen = chosen

    def __call__(self, layers: Sequence[Layer], makes: Mapping[By, Make], least_rows: int) -> Sequence[By]:
        self.asked.append(((layers[0].out_features, layers[0].in_features), len(layers), set(makes)))
        return self._chosen


@pytest.mark.parametrize(
    ("rows", "chosen"), list(pairs([1, 2, 3, 8, 12, 32, 33, 700, 1025, 3000], [PACKED, COMPILED, ONEDNN, MIXED]))
)
def test_products_are_the_same(rows: int, chosen: Sequence[By]) -> None:
    plain, other = layers(), layers()
    taken = choose_products(other, most_packed_nbytes=1 << 20, threads=ONE, choose=Chosen(chosen))
    assert taken == (SMALL + LARGE) * (By.PACKED in chosen)
    hidden = torch.randn(1, rows, 64)
    with torch.inference_mode():
        assert torch.allclose(other(hidden), plain(hidden), atol=1e-5)
        assert torch.allclose(other(hidden[0]), plain(hidden[0]), atol=1e-5)
    assert other.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("pieces", [2, 3, 7, 200])
def test_outputs_are_divided_among_threads(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_products, "_NBYTES_PER_THREAD", SMALL // pieces)
    layer = layers()[0]
    assert isinstance(layer, nn.Linear)
    torch.set_num_threads(pieces)
    try:
        made = CompiledProduct(layer, WorkerThreads(min(pieces, 4)))(hidden := torch.randn(5, 64))
    finally:
        torch.set_num_threads(1)
    assert torch.allclose(made, layer(hidden), atol=1e-5)


def test_the_largest_weights_are_packed_first_within_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_products, "has_onednn", lambda: True)
    choose = partial(choose_products, choose=Chosen(PACKED))
    assert choose(layers(), most_packed_nbytes=SMALL + LARGE) == SMALL + LARGE
    assert choose(layers(), most_packed_nbytes=SMALL + LARGE - 1) == LARGE
    assert choose(layers(), most_packed_nbytes=LARGE - 1) == SMALL
    assert choose(layers(), most_packed_nbytes=0) == 0
    assert choose(layers().to(torch.bfloat16), most_packed_nbytes=1 << 20) == 0
    alike = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    assert choose(alike, most_packed_nbytes=3 * 64 * 64 * 4) == 3 * 64 * 64 * 4
    assert ["forward" in vars(layer) for layer in alike] == [True, True, True, False]
    monkeypatch.setattr(linear_products, "LEAST_PACKED_NBYTES", LARGE + 1)
    assert choose(layers(), most_packed_nbytes=1 << 20) == 0
    monkeypatch.setattr(linear_products, "has_onednn", lambda: False)
    assert choose(layers(), most_packed_nbytes=1 << 20) == 0


def test_layers_of_one_shape_are_measured_together_and_stay_plain_where_that_is_fastest() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 32)).requires_grad_(False)
    choose = Chosen(PLAIN)
    assert choose_products(model, most_packed_nbytes=1 << 20, threads=ONE, choose=choose) == 0
    every = {By.ONEDNN, By.PACKED, By.COMPILED}
    assert choose.asked == [((64, 64), 4, every), ((32, 64), 1, every)]
    assert not any("forward" in vars(layer) for layer in model)


def test_no_more_is_packed_to_measure_it_than_there_is_memory_for() -> None:
    alike = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    choose = Chosen(PLAIN)
    choose_products(alike, most_packed_nbytes=2 * 64 * 64 * 4, choose=choose)
    assert choose.asked == [((64, 64), 2, {By.ONEDNN, By.PACKED})]


def test_without_memory_for_packed_weights_the_other_products_are_measured() -> None:
    model, choose = layers(), Chosen(ONEDNN)
    assert choose_products(model, most_packed_nbytes=0, threads=ONE, choose=choose) == 0
    assert [makes for _, _, makes in choose.asked] == [{By.ONEDNN, By.COMPILED}] * 2
    hidden = torch.randn(5, 64)
    assert torch.allclose(model(hidden), layers()(hidden), atol=1e-5)


def test_small_layers_are_not_packed_and_the_smallest_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_products, "LEAST_PACKED_NBYTES", LARGE + 1)
    monkeypatch.setattr(linear_products, "LEAST_NBYTES", SMALL + 1)
    choose = Chosen(COMPILED)
    choose_products(layers(), most_packed_nbytes=1 << 20, threads=ONE, choose=choose)
    assert choose.asked == [((128, 96), 1, {By.ONEDNN, By.COMPILED})]


def test_an_encoder_has_too_many_rows_for_compiled_products() -> None:
    choose = Chosen(PLAIN)
    choose_products(layers(), most_packed_nbytes=1 << 20, threads=ONE, least_rows=33, choose=choose)
    assert {by for _, _, makes in choose.asked for by in makes} == {By.ONEDNN, By.PACKED}


def test_what_is_fastest_is_measured_for_the_rows_that_matter() -> None:
    few = [nn.Linear(512, 128).requires_grad_(False) for _ in range(2)]
    calls: dict[str, list[int]] = {"slow": [], "fast": []}

    def make(name: str, layer: Layer) -> Product:
        def product(rows: torch.Tensor) -> torch.Tensor:
            calls[name].append(len(rows))
            return rows if name == "fast" else torch.linalg.matrix_power(torch.eye(256) * 0.5, 40)

        return product

    slow, fast = (partial(make, name) for name in calls)
    assert fastest(few, {By.PACKED: slow}, 1) == list(PLAIN)
    assert set(calls["slow"]) == set(ROWS)
    assert fastest(few, {By.PACKED: slow, By.COMPILED: fast}, 1) == [*COMPILED[:5], *PLAIN[5:]]
    assert set(calls["fast"]) == {1, 2, 4, 8, 16}
    assert fastest(few, {By.PACKED: fast}, 33) == [*PLAIN[:5], *PACKED[5:]]


def test_of_large_products_a_part_is_measured() -> None:
    made: list[int] = []

    def make(layer: Layer) -> Product:
        made.append(layer.out_features)
        return layer

    chosen = fastest([nn.Linear(4096, 4096).requires_grad_(False)], {By.PACKED: make}, 65)
    assert len(chosen) == len(ROWS)
    assert made[0] == 4096
    assert len(made) == 3
    assert max(made[1:]) < 1024


def test_answers_equal_generate(
    model_dir: Path, reference: Reference, encoder: TransformersEncoderEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen in (PACKED, COMPILED, ONEDNN, MIXED):
        monkeypatch.setattr(linear_products, "fastest", Chosen(chosen))
        engine, packed_encoder = text_engine(model_dir, max_sequences=4), encoder_engine(model_dir)
        questions = {f"r{seed}": random_question(random.Random(seed), seed % 3) for seed in range(4)}
        for name, question in questions.items():
            engine.add(engine_request(name, question, reference, packed_encoder, greedy(12)))
        assert run(engine) == {name: reference.answer(question, 12) for name, question in questions.items()}
