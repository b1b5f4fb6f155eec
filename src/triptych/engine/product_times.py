"""How long products of a model's linear layers take in a pass of the model, where a cache of the processor keeps the weights only if it keeps them all.

So some layers of each shape are computed in turn, as a pass does, then the next ones of each. All products of one pass are of the same kind, and each
pass is of another kind: after a call of another kind a product takes longer, as its code was not used just now.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from triptych.engine.joined_layers import Layer, first_outputs
from triptych.engine.linear_products import By, Make, Product

MOST_COMPILED_ROWS = 16
"""More rows are not measured with the compiled product: each eight of them read the weights again."""
_MULTIPLICATIONS, _OUTPUTS = 200_000_000, 256
"""Of a product that is measured, beyond which fewer outputs are computed, in multiples of so many: another number than whole vectors
makes the plain product slower. It bounds the time that a shape takes.
"""
_FEW_MULTIPLICATIONS, _MOST_CALLS = 25_000_000, 3
"""Up to so many layers of a shape are computed in one pass, where that takes little time: right after a very large layer, such as the vocabulary's,
a small one takes up to twice as long, and then that is one of several samples.
"""
_SAMPLES, _LONG_S = 5, 24e-3
"""Each product has so many, and more until all with the same number of rows took so long. The median counts: a sample is fast or slow by chance."""

Times = Mapping[By, float]
"""Seconds of a product of each kind."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Layers of one shape, and how products of each kind are made of them."""

    layers: Sequence[Layer]
    makes: Mapping[By, Make]


@torch.inference_mode()
def product_times_s(shapes: Sequence[Alike], row_counts: Sequence[int]) -> list[list[Times]]:
    """For each of ``shapes``, which are those of one model, the times with each number of rows."""
    products = [_Products(one) for one in shapes]
    by_rows = [_times_s([one.turns(rows) for one in products]) for rows in row_counts]
    return [[times_s[number] for times_s in by_rows] for number in range(len(shapes))]


class _Products:
    """Of layers of one shape."""

    def __init__(self, alike: Alike) -> None:
        self._layer, self._makes = alike.layers[0], alike.makes
        self._made = {by: [make(layer) for layer in alike.layers] for by, make in alike.makes.items()}

    def turns(self, rows: int) -> "_Turns":
        hidden = torch.full((rows, self._layer.in_features), 0.5)
        outputs = max(1, _MULTIPLICATIONS // (hidden.numel() * _OUTPUTS)) * _OUTPUTS
        products: Mapping[By, Sequence[Product]] = self._made
        if outputs < self._layer.out_features:
            part = first_outputs(self._layer, outputs)
            products = {by: [make(part)] for by, make in self._makes.items()}
        tried = {by: one for by, one in products.items() if by is not By.COMPILED or rows <= MOST_COMPILED_ROWS}
        return _Turns(tried, hidden, _FEW_MULTIPLICATIONS // (hidden.numel() * self._layer.out_features))


class _Turns:
    """Of layers of one shape with the same number of rows."""

    def __init__(self, products: Mapping[By, Sequence[Product]], hidden: torch.Tensor, calls: int) -> None:
        self._kinds, self._hidden = list(products.items()), hidden
        self._samples_s: dict[By, list[float]] = {by: [] for by in products}
        self.kinds = len(self._kinds)
        layers = min(len(one) for one in products.values())
        self.calls = max(1, min(calls, _MOST_CALLS, layers))
        """In one pass."""

    @property
    def times_s(self) -> Times:
        """Without the first call of each kind, in which oneDNN makes a kernel."""
        return {by: median(samples_s[1:]) for by, samples_s in self._samples_s.items()}

    def compute(self, number: int) -> None:
        """In the pass ``number``, the next layer."""
        kind = number % self.kinds
        by, products = self._kinds[kind]
        samples_s = self._samples_s[by]
        # Each kind begins elsewhere, so that none finds in a cache what another one has just read.
        product = products[(len(samples_s) + kind * len(products) // self.kinds) % len(products)]
        began_s = time.thread_time()  # others may have the processor meanwhile
        product(self._hidden)
        samples_s.append(time.thread_time() - began_s)


def _times_s(shapes: Sequence[_Turns]) -> list[Times]:
    """Of all shapes with the same number of rows."""
    least_passes = (1 + _SAMPLES) * max((one.kinds for one in shapes), default=0)
    calls = [one for number in range(_MOST_CALLS) for one in shapes if number < one.calls]
    passes, began_s = 0, time.thread_time()
    while calls and (passes < least_passes or time.thread_time() - began_s < _LONG_S):
        for one in calls:
            one.compute(passes)
        passes += 1
    return [one.times_s for one in shapes]
