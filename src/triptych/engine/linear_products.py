"""The linear layers of a model on a CPU, in float32: each by the fastest of four products, by its shape and the number of rows.

*Plain* is ``torch.nn.functional.linear``: MKL, which leaves AVX-512 unused on processors that are not Intel's. *oneDNN* has its own kernels
for the same weights. Both repack them in each call, which few rows do not repay. *Packed* has a second copy of the weights in oneDNN's layout.
*Compiled* (``cpu_kernels.few_rows_product``) reads the plain weights once for up to eight rows. Which is faster depends on the processor as
well, so each shape is measured when the model is loaded.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import cycle, islice
from math import inf
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from triptych.engine.heap import trim
from triptych.engine.joined_layers import (
    JoinedLinear,
    Layer,
    first_outputs,
    nbytes_of,
    outputs_of,
    parts_of,
    together,
    weights_of,
)
from triptych.engine.worker_threads import WorkerThreads

LEAST_PACKED_NBYTES = 1 << 20
"""Least size of a layer that is packed: for smaller ones the call costs more than it saves."""
LEAST_NBYTES = 1 << 16
"""Least size of a layer that is measured."""
_PACKED_FOR_ROWS = 32
"""Row count that the layout is optimized for. Optimized for 8 or for 512 rows, no product took less time."""
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
"""Rows of the products that are measured."""
_MOST_ROWS = (1, 2, 5, 11, 23, 64, 256, inf)
"""Up to how many rows each measurement holds."""
MOST_COMPILED_ROWS = 16
"""More rows are not measured with the compiled product: each eight of them read the weights again."""
_MULTIPLICATIONS, _OUTPUTS = 200_000_000, 256
"""Of a product that is measured, beyond which fewer outputs are computed, in multiples of so many: another number than whole vectors
makes the plain product slower. It bounds the time that a shape takes.
"""
_SAMPLE_S, _SAMPLES, _LONGEST_S = 0.5e-3, 5, 6e-3
"""The median counts: a sample is fast by chance where the cache has just these layers. Each has as many calls as take the first time together; there are so many at least, and more in the second time."""
_SAMPLED_NBYTES = 96 << 20
"""Layers of one shape are computed in turns, as in a pass: more than a processor's cache, if there are so many."""
_WORTHWHILE = 0.95
"""Share of the plain product's time below which another one is used."""
_NBYTES_PER_THREAD = 4 << 20
"""Weights that take longer to read than another thread to begin."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""Of rows, [..., inputs], with a layer's weights: [..., outputs]."""


class By(Enum):
    PLAIN = "plain"
    ONEDNN = "onednn"
    PACKED = "packed"
    COMPILED = "compiled"


Make = Callable[[Layer], Product]
Choose = Callable[[Sequence[Layer], Mapping[By, Make], int], Sequence[By]]
"""Of layers of one shape, with products other than the plain one, and the fewest rows that matter: the fastest, for each of ``ROWS``."""


def choose_products(
    model: nn.Module,
    *,
    most_packed_nbytes: int,
    without: Collection[nn.Linear] = (),
    least_rows: int = 1,
    threads: WorkerThreads | None = None,
    choose: Choose | None = None,
) -> int:
    """Let the float32 linear layers of ``model`` on a CPU compute by the fastest product, the largest first. Returns the bytes of packed weights.

    ``most_packed_nbytes``: memory for them. ``without``: layers that compute nothing, as joined ones do (``joined_layers``). ``least_rows``: fewest rows of a
    product that matter. ``threads``: for compiled products, which are tried only with them. Layers of one shape are measured together (``choose``). Does
    nothing without oneDNN or on other processors than x86.
    """
    if not has_onednn():
        return 0
    taken = 0
    for layers in _by_shape(model, frozenset(without)):
        nbytes = nbytes_of(layers[0])
        fits = (most_packed_nbytes - taken) // nbytes if nbytes >= LEAST_PACKED_NBYTES else 0
        makes: dict[By, Make] = {By.ONEDNN: OneDnnProduct}
        if fits:
            makes[By.PACKED] = PackedProduct
        if threads is not None and least_rows <= MOST_COMPILED_ROWS:
            makes[By.COMPILED] = partial(CompiledProduct, threads=threads)
        sampled = max(1, _SAMPLED_NBYTES // nbytes)
        chosen = (choose or fastest)(layers[: min(sampled, fits) if fits else sampled], makes, least_rows)
        for number, layer in enumerate(layers):
            wanted = {by: make for by, make in makes.items() if by in chosen and (by is not By.PACKED or number < fits)}
            taken += nbytes * (By.PACKED in wanted)
            if wanted:
                # On the instance, which keeps hooks, names and parameters.
                layer.forward = _ByRows(layer, {by: make(layer) for by, make in wanted.items()}, chosen)  # type: ignore[method-assign]
    return taken


def _by_shape(model: nn.Module, without: frozenset[nn.Module]) -> Iterator[list[Layer]]:
    """Layers that count, those of one shape together, the largest first."""
    found: dict[tuple[int, ...], list[Layer]] = {}
    for layer in model.modules():
        if not (type(layer) is nn.Linear or isinstance(layer, JoinedLinear)) or layer in without:
            continue
        parts = parts_of(layer)
        if all(one.weight.dtype == torch.float32 and one.weight.device.type == "cpu" for one in parts):
            shape = (layer.in_features, *(one.out_features for one in parts))
            found.setdefault(shape, []).append(layer)
    for layers in sorted(found.values(), key=lambda layers: nbytes_of(layers[0]), reverse=True):
        if nbytes_of(layers[0]) >= LEAST_NBYTES:
            yield layers


@torch.inference_mode()
def fastest(layers: Sequence[Layer], makes: Mapping[By, Make], least_rows: int) -> list[By]:
    """Measure all products, in turns, for each of ``ROWS``. Where only fewer rows than ``least_rows`` come, it is the plain one."""
    chosen: list[By] = []
    of_all = {by: [make(layer) for layer in layers] for by, make in makes.items()}
    for rows, most_rows in zip(ROWS, _MOST_ROWS, strict=True):
        tried = [by for by in makes if by is not By.COMPILED or rows <= MOST_COMPILED_ROWS]
        if most_rows < least_rows or not tried:
            chosen.append(By.PLAIN)
            continue
        outputs = max(1, _MULTIPLICATIONS // (rows * layers[0].in_features * _OUTPUTS)) * _OUTPUTS
        products: list[Sequence[Product]] = [layers, *(of_all[by] for by in tried)]
        if outputs < layers[0].out_features:
            part = first_outputs(layers[0], outputs)
            products = [[part], *([makes[by](part)] for by in tried)]
        plain_s, *others_s = _times_s(products, rows, layers[0].in_features)
        times_s = {By.PLAIN: _WORTHWHILE * plain_s} | dict(zip(tried, others_s, strict=True))
        chosen.append(min(times_s, key=lambda by: times_s[by]))
    return chosen


def _times_s(products: Sequence[Sequence[Product]], rows: int, inputs: int) -> list[float]:
    """Of each kind of product, which has some layers, the time of one."""
    hidden = torch.full((rows, inputs), 0.5)
    # Each kind begins elsewhere, so that none finds in the cache what another one has just read.
    starts = [number * len(one) // len(products) for number, one in enumerate(products)]
    turns = [cycle([*one[start:], *one[:start]]) for start, one in zip(starts, products, strict=True)]

    def sample_s(turn: Iterator[Product], times: int) -> float:
        began_s = time.thread_time()  # others may have the processor meanwhile
        for product in islice(turn, times):
            product(hidden)
        return (time.thread_time() - began_s) / times

    calls = [max(1, round(_SAMPLE_S / min(sample_s(turn, 1), sample_s(turn, 1)))) for turn in turns]
    samples, began_s = list[list[float]](), time.thread_time()
    while len(samples) < _SAMPLES or time.thread_time() - began_s < _LONGEST_S:
        samples.append([sample_s(*one) for one in zip(turns, calls, strict=True)])
    return [median(one) for one in zip(*samples, strict=True)]


class OneDnnProduct:
    """The product of a float32 layer on a CPU, by oneDNN with its own weights."""

    def __init__(self, layer: Layer) -> None:
        self._weights = weights_of(layer)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return outputs_of(self._weights, rows, onednn_linear)


class PackedProduct:
    """The product of a float32 layer on a CPU, with a packed copy of its weights."""

    def __init__(self, layer: Layer) -> None:
        self._weights = weights_of(layer)
        self._bias: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None
        self.load()

    def load(self) -> None:
        """Pack the weights as they are now."""
        weight, self._bias = together(self._weights)
        self._packed = _ops()._reorder_linear_weight(weight, _PACKED_FOR_ROWS)  # noqa: SLF001

    def unload(self) -> None:
        """Free the copy, until ``load``."""
        self._packed = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            raise AssertionError("the weights are unloaded")
        return onednn_linear(rows, self._packed, self._bias)


class CompiledProduct:
    """The product of a float32 layer on a CPU for few rows, with its own weights. ``threads`` divide its outputs where they are many."""

    def __init__(self, layer: Layer, threads: WorkerThreads) -> None:
        from triptych.engine import cpu_kernels  # takes a second, and other products need no numba

        self._kernel: Any = cpu_kernels.few_rows_product
        none = torch.empty(0)
        self._weights = [(weight, none if bias is None else bias) for weight, bias in weights_of(layer)]
        self._outputs = layer.out_features
        self._threads = threads
        self._pieces = nbytes_of(layer) // _NBYTES_PER_THREAD

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        made = rows.new_empty(*rows.shape[:-1], self._outputs)
        flat = rows.reshape(-1, rows.shape[-1]).contiguous().numpy()
        product, first = made.view(-1, self._outputs).numpy(), 0
        for weight, bias in self._weights:
            self._compute(flat, weight, bias, product, first)
            first += len(weight)
        return made

    def _compute(self, flat: Any, weight: torch.Tensor, bias: torch.Tensor, product: Any, first: int) -> None:
        """Outputs from ``first`` on."""
        arrays = weight.numpy(), bias.numpy()
        pieces = self._threads.usable(self._pieces)
        if pieces < 2:
            self._kernel(flat, *arrays, 0, len(weight), product, first)
        else:
            ends = [len(weight) * number // pieces for number in range(pieces + 1)]
            self._threads.run(lambda begin, end: self._kernel(flat, *arrays, begin, end, product, first), ends)


class _ByRows:
    """The fastest product, by the number of rows."""

    def __init__(self, layer: Layer, others: Mapping[By, Product], chosen: Sequence[By]) -> None:
        self.others = others
        self._weights = weights_of(layer)
        self._products = [others.get(by, self._plain) for by in chosen]

    def _plain(self, rows: torch.Tensor) -> torch.Tensor:
        return outputs_of(self._weights, rows, linear)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._products[bisect_left(_MOST_ROWS, rows.numel() // rows.shape[-1])](rows)


def load_packed(model: nn.Module) -> None:
    """Pack again what is packed, from weights that are there again."""
    for packed in _packed(model):
        packed.load()


def unload_packed(model: nn.Module) -> None:
    """Free the packed copies, until ``load_packed``. The model must not compute meanwhile."""
    packed = list(_packed(model))
    for one in packed:
        one.unload()
    if packed:
        trim()


def _packed(model: nn.Module) -> Iterator[PackedProduct]:
    for module in model.modules():
        if isinstance(module.forward, _ByRows):
            for product in module.forward.others.values():
                if isinstance(product, PackedProduct):
                    yield product


def onednn_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Of rows [..., inputs] with weights [outputs, inputs], contiguous, transposed or packed: [..., outputs]. oneDNN makes, and keeps, a kernel
    for each shape, which takes a millisecond.
    """
    made: torch.Tensor = _ops()._linear_pointwise(rows, weight, bias, "none", [], "")  # noqa: SLF001
    return made


def _ops() -> Any:
    """The kernels behind compiled models, which torch exposes only here."""
    return torch.ops.mkldnn


def has_onednn() -> bool:
    """Whether ``onednn_linear`` and packed weights work here, on processors that they are fast on."""
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and hasattr(_ops(), "_linear_pointwise")
        and hasattr(_ops(), "_reorder_linear_weight")
    )
