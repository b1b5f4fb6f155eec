"""Linear layers of a model on a CPU, in float32: each by the fastest kind of product, by its shape and the number of
rows.

Which is the fastest depends on the processor and on what its caches keep in a pass. So all shapes are measured when the
model is loaded.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import inf

import torch
from torch import nn

from triptych.engine.heap import trim
from triptych.engine.joined_layers import JoinedLinear, Layer, nbytes_of, parts_of
from triptych.engine.linear_products import (
    By,
    CompiledProduct,
    CopyProduct,
    JoinedProduct,
    Make,
    OneDnnProduct,
    PackedProduct,
    PlainProduct,
    Product,
    has_onednn,
)
from triptych.engine.product_times import MOST_COMPILED_ROWS, Alike, Times, product_times_s
from triptych.engine.worker_threads import WorkerThreads

LEAST_PACKED_NBYTES = 1 << 20
"""Least size of a layer that is packed: for smaller ones the call costs more than it saves. Of joined ones there is a plain copy."""
LEAST_NBYTES = 1 << 16
"""Least size of a layer that is measured."""
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
"""Rows of the products that are measured."""
_MOST_ROWS = (1, 2, 5, 11, 23, 64, 256, inf)
"""Up to how many rows each measurement holds."""
_SAMPLED_NBYTES = 48 << 20
"""Bytes of layers of one shape that are measured: of all shapes together more than a cache of a processor, if there are
so many.
"""
_COPIES = frozenset({By.PACKED, By.JOINED})
_WORTHWHILE = 0.95
"""Share of the plain product's time below which another one is used."""

Measure = Callable[[Sequence[Alike], Sequence[int]], Sequence[Sequence[Times]]]
"""Function from a model's shapes, each with some of its layers, to the times with each number of rows
(``product_times_s``).
"""


def choose_products(
    model: nn.Module,
    *,
    most_packed_nbytes: int,
    without: Collection[nn.Linear] = (),
    least_rows: int = 1,
    threads: WorkerThreads | None = None,
    measure: Measure | None = None,
) -> int:
    """Let the float32 linear layers of ``model`` on a CPU compute by the fastest product, the largest first. Returns the bytes of copies of weights.

    ``most_packed_nbytes``: memory for them. ``without``: layers that compute nothing, as parts of joined ones do (``joined_layers``). ``least_rows``: fewest rows of a
    product that matter. ``threads``: for compiled products, which are tried only with them. Does nothing without oneDNN or on other processors than x86.
    """
    if not has_onednn():
        return 0
    shapes = _by_shape(model, frozenset(without))
    makes: dict[By, Make] = {
        By.PLAIN: PlainProduct,
        By.ONEDNN: OneDnnProduct,
        By.PACKED: PackedProduct,
        By.JOINED: JoinedProduct,
    }
    if threads is not None and least_rows <= MOST_COMPILED_ROWS:
        makes[By.COMPILED] = partial(CompiledProduct, threads=threads)
    matter = [rows for rows, most_rows in zip(ROWS, _MOST_ROWS, strict=True) if most_rows >= least_rows]
    measured = (measure or product_times_s)(_sampled(shapes, makes, most_packed_nbytes), matter)
    taken = 0
    for layers, times_s in zip(shapes, measured, strict=True):
        fits = (most_packed_nbytes - taken) // nbytes_of(layers[0])
        for number, layer in enumerate(layers):
            chosen = [By.PLAIN] * (len(ROWS) - len(matter)) + [
                fastest(times, copied=number < fits) for times in times_s
            ]
            taken += nbytes_of(layer) * bool(_COPIES.intersection(chosen))
            if set(chosen) != {By.PLAIN}:
                # On the instance, which keeps hooks, names and parameters.
                layer.forward = _ByRows({way: makes[way](layer) for way in set(chosen)}, chosen)  # type: ignore[method-assign]
    return taken


def _by_shape(model: nn.Module, without: frozenset[nn.Module]) -> list[list[Layer]]:
    """Layers that count, those of one shape together, the largest first."""
    layers_of: dict[tuple[int, ...], list[Layer]] = {}
    for layer in model.modules():
        if not (type(layer) is nn.Linear or isinstance(layer, JoinedLinear)) or layer in without:
            continue
        parts = parts_of(layer)
        if all(part.weight.dtype == torch.float32 and part.weight.device.type == "cpu" for part in parts):
            shape = (layer.in_features, *(part.out_features for part in parts))
            layers_of.setdefault(shape, []).append(layer)
    measured = [layers for layers in layers_of.values() if nbytes_of(layers[0]) >= LEAST_NBYTES]
    return sorted(measured, key=lambda layers: nbytes_of(layers[0]), reverse=True)


def _sampled(shapes: Sequence[Sequence[Layer]], makes: Mapping[By, Make], most_copied_nbytes: int) -> list[Alike]:
    """Sample some layers of each shape, of which there is memory for copies, or which are not copied."""
    samples: list[Alike] = []
    left = most_copied_nbytes
    for layers in shapes:
        nbytes, kind = nbytes_of(layers[0]), _kind_of_copy(layers[0])
        some = layers[: max(1, _SAMPLED_NBYTES // nbytes)]
        fits = left // nbytes if kind is not None else 0
        if fits:
            some = some[:fits]
            left -= nbytes * len(some)
        unused = _COPIES.difference({kind} if fits else ())
        samples.append(Alike(some, {way: make for way, make in makes.items() if way not in unused}))
    return samples


def _kind_of_copy(layer: Layer) -> By | None:
    if nbytes_of(layer) >= LEAST_PACKED_NBYTES:
        return By.PACKED
    return By.JOINED if isinstance(layer, JoinedLinear) else None


def fastest(times_s: Times, *, copied: bool = True) -> By:
    """``copied``: whether there is memory for a copy of the weights."""
    costs = {way: time_s * (_WORTHWHILE if way is By.PLAIN else 1.0) for way, time_s in times_s.items()}
    if not copied:
        for way in _COPIES:
            costs.pop(way, None)
    return min(costs, key=costs.__getitem__)


class _ByRows:
    """The fastest product, by the number of rows."""

    def __init__(self, products: Mapping[By, Product], chosen: Sequence[By]) -> None:
        self.products = products
        self._by_rows = [products[way] for way in chosen]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._by_rows[bisect_left(_MOST_ROWS, rows.numel() // rows.shape[-1])](rows)


def load_copies(model: nn.Module) -> None:
    """Copy again what is copied, from weights that are there again."""
    for copied in _copied(model):
        copied.load()


def unload_copies(model: nn.Module) -> None:
    """Free the copies, until ``load_copies``. The model must not compute meanwhile."""
    copied = list(_copied(model))
    for layer in copied:
        layer.unload()
    if copied:
        trim()


def _copied(model: nn.Module) -> Iterator[CopyProduct]:
    for module in model.modules():
        if isinstance(module.forward, _ByRows):
            for product in module.forward.products.values():
                if isinstance(product, CopyProduct):
                    yield product
