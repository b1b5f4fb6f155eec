"""Times of the products of a model's linear layers in a pass of the model.

In a pass a cache of the processor keeps the weights only if it keeps them all. So some layers of each shape are
computed in turn, as a pass does, then the next ones of each. All products of one pass are of the same kind, and each
pass is of another kind. After a call of another kind a product takes longer, as its code was not used just now.
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
"""Size of a measured product, beyond which fewer outputs are computed, in multiples of so many. It bounds the time that
a shape takes. Another number than whole vectors makes the plain product slower.
"""
_FEW_MULTIPLICATIONS, _MOST_CALLS = 25_000_000, 3
"""Most layers of a shape that are computed in one pass, where that takes little time. Right after a very large layer,
such as the vocabulary's, a small one takes up to twice as long. With several layers that is one of several samples.
"""
_SAMPLES, _LONG_S = 5, 24e-3
"""Samples of each product, and the seconds that all with the same number of rows take at least. The median counts: a
sample is fast or slow by chance.
"""

Times = Mapping[By, float]
"""Seconds of a product of each kind."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Layers of one shape, and how products of each kind are made of them."""

    layers: Sequence[Layer]
    makes: Mapping[By, Make]


@torch.inference_mode()
def product_times_s(shapes: Sequence[Alike], row_counts: Sequence[int]) -> list[list[Times]]:
    """Times of ``shapes``, which are those of one model, with each number of rows."""
    products = [_Products(shape) for shape in shapes]
    by_rows = [_times_s([product.turns(rows) for product in products]) for rows in row_counts]
    return [[times_s[number] for times_s in by_rows] for number in range(len(shapes))]


class _Products:
    """Products of layers of one shape."""

    def __init__(self, alike: Alike) -> None:
        self._layer, self._makes = alike.layers[0], alike.makes
        self._made = {way: [make(layer) for layer in alike.layers] for way, make in alike.makes.items()}

    def turns(self, rows: int) -> "_Turns":
        hidden = torch.full((rows, self._layer.in_features), 0.5)
        outputs = max(1, _MULTIPLICATIONS // (hidden.numel() * _OUTPUTS)) * _OUTPUTS
        products: Mapping[By, Sequence[Product]] = self._made
        if outputs < self._layer.out_features:
            part = first_outputs(self._layer, outputs)
            products = {way: [make(part)] for way, make in self._makes.items()}
        tried = {
            way: product for way, product in products.items() if way is not By.COMPILED or rows <= MOST_COMPILED_ROWS
        }
        return _Turns(tried, hidden, _FEW_MULTIPLICATIONS // (hidden.numel() * self._layer.out_features))


class _Turns:
    """Turns of layers of one shape with the same number of rows."""

    def __init__(self, products: Mapping[By, Sequence[Product]], hidden: torch.Tensor, calls: int) -> None:
        self._kinds, self._hidden = list(products.items()), hidden
        self._samples_s: dict[By, list[float]] = {way: [] for way in products}
        self.kinds = len(self._kinds)
        layers = min(len(layers_) for layers_ in products.values())
        self.calls = max(1, min(calls, _MOST_CALLS, layers))
        """Calls in one pass."""

    @property
    def times_s(self) -> Times:
        """Times without the first call of each kind, in which oneDNN makes a kernel."""
        return {way: median(samples_s[1:]) for way, samples_s in self._samples_s.items()}

    def compute(self, number: int) -> None:
        """Compute the next layer in the pass ``number``."""
        kind = number % self.kinds
        way, products = self._kinds[kind]
        samples_s = self._samples_s[way]
        # Each kind begins elsewhere, so that none finds in a cache what another one has just read.
        product = products[(len(samples_s) + kind * len(products) // self.kinds) % len(products)]
        began_s = time.thread_time()  # others may have the processor meanwhile
        product(self._hidden)
        samples_s.append(time.thread_time() - began_s)


def _times_s(shapes: Sequence[_Turns]) -> list[Times]:
    """Times of all shapes with the same number of rows."""
    least_passes = (1 + _SAMPLES) * max((shape.kinds for shape in shapes), default=0)
    calls = [shape for number in range(_MOST_CALLS) for shape in shapes if number < shape.calls]
    passes, began_s = 0, time.thread_time()
    while calls and (passes < least_passes or time.thread_time() - began_s < _LONG_S):
        for call in calls:
            call.compute(passes)
        passes += 1
    return [shape.times_s for shape in shapes]
