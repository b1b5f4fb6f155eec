from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import inf

import pytest
import torch
from torch import nn

from triptych.engine import product_times
from triptych.engine.joined_layers import Layer
from triptych.engine.linear_products import By, Make, Product
from triptych.engine.product_times import Alike, product_times_s

ROWS = (1, 8, 16, 32)
KINDS = (By.PLAIN, By.ONEDNN, By.PACKED, By.COMPILED)


@pytest.fixture(autouse=True)
def no_longer_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_times, "_LONG_S", 0.0)


def layers(count: int, inputs: int, outputs: int) -> list[nn.Linear]:
    return [nn.Linear(inputs, outputs).requires_grad_(False) for _ in range(count)]


class Calls:
    """Products that compute nothing, and which of them were called."""

    def __init__(self) -> None:
        self.made: list[Layer] = []
        self.called: list[tuple[Layer, By, int]] = []

    def alike(self, of_one_shape: Sequence[Layer], kinds: Sequence[By] = KINDS) -> Alike:
        makes: dict[By, Make] = {by: partial(self._make, by) for by in kinds}
        return Alike(of_one_shape, makes)

    def _make(self, by: By, layer: Layer) -> Product:
        self.made.append(layer)

        def product(rows: torch.Tensor) -> torch.Tensor:
            assert rows.shape[-1] == layer.in_features
            self.called.append((layer, by, len(rows)))
            return rows

        return product


def test_it_is_the_time_of_a_product_of_each_kind() -> None:
    def slow(_: Layer) -> Product:
        return lambda _: torch.linalg.matrix_power(torch.eye(256) * 0.5, 40)

    alike = Alike(layers(2, 64, 32), {By.PLAIN: slow, By.PACKED: lambda _: lambda rows: rows})
    (times_s,) = product_times_s([alike], ROWS)
    assert len(times_s) == len(ROWS)
    assert all(0.0 <= times[By.PACKED] < times[By.PLAIN] < 1.0 for times in times_s)


def test_the_first_call_and_rare_slow_ones_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s, calls = 0.0, 0
    monkeypatch.setattr("time.thread_time", lambda: clock_s)

    def product(rows: torch.Tensor) -> torch.Tensor:
        nonlocal clock_s, calls
        calls += 1
        clock_s += 9.0 if calls in {1, 3, 4} else 0.5
        return rows

    assert product_times_s([Alike(layers(1, 4, 4), {By.PLAIN: lambda _: product})], [1]) == [[{By.PLAIN: 0.5}]]


def test_layers_of_all_shapes_take_turns_as_in_a_pass() -> None:
    calls = Calls()
    large, small, single = layers(8, 4096, 2048), layers(8, 64, 64), layers(1, 64, 96)
    product_times_s([calls.alike(large), calls.alike(small), calls.alike(single, KINDS[:3])], [8])
    kinds_of: dict[Layer, set[By]] = {}
    for layer, by, _ in calls.called:
        kinds_of.setdefault(layer, set()).add(by)
    assert kinds_of.keys() == {*large, *small, *single}
    assert kinds_of[single[0]] == set(KINDS[:3])
    for shape in (large, small, single):
        for by in KINDS[:3]:
            samples = sum(layer in shape and kind is by for layer, kind, _ in calls.called)
            assert samples >= 6, "of the first is no sample"
    for (before, _, _), (after, _, _) in pairwise(calls.called):
        assert before is not after, "its weights were in a cache"
    positions = [number for number, (layer, _, _) in enumerate(calls.called) if layer in large]
    assert {after - before for before, after in pairwise(positions)} == {5}, "three small layers, and the one, between"


def test_more_rows_are_not_measured_with_the_compiled_product() -> None:
    calls = Calls()
    (times_s,) = product_times_s([calls.alike(layers(1, 64, 64))], ROWS)
    assert [set(times) for times in times_s] == [set(KINDS)] * 3 + [set(KINDS[:3])]
    assert {rows for _, by, rows in calls.called if by is By.COMPILED} == {1, 8, 16}


def test_of_large_products_a_part_is_measured() -> None:
    calls = Calls()
    (whole,) = layers(1, 4096, 4096)
    product_times_s([calls.alike([whole], [By.PLAIN])], [8, 128])
    assert calls.made[0] is whole
    assert [layer.out_features for layer in calls.made] == [4096, 256]
    assert {(layer.out_features, rows) for layer, _, rows in calls.called} == {(4096, 8), (256, 128)}


def test_small_products_are_computed_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_times, "_LONG_S", 10e-3)
    calls = Calls()
    product_times_s([calls.alike(layers(1, 64, 64))], [1])
    assert len(calls.called) > 100


def test_of_a_model_without_such_layers_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_times, "_LONG_S", inf)
    assert product_times_s([], ROWS) == []
