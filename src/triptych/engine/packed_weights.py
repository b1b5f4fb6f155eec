"""CPU linear layers with a second copy of their weights, in oneDNN's packed layout.

``torch.nn.functional.linear`` repacks float32 weights in each call, which a few rows do not repay: 8 rows take up to twice as long as
necessary. With more rows either layout is faster, by up to a quarter, depending on the processor, the layer's shape and the rows. So both
are kept, within bounded memory, and each shape is measured when the model is loaded.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from triptych.engine.heap import trim

LEAST_NBYTES = 1 << 20
"""Least size of a layer: for smaller ones the call costs more than it saves."""
_PACKED_FOR_ROWS = 32
"""Row count that the layout is optimized for. Optimized for 512 rows, no product took less time."""
ROWS = (1, 8, 32, 128, 512)
"""Rows of the products that are measured."""
_MOST_ROWS = (2, 16, 64, 256, inf)
"""Up to how many rows each measurement holds."""
_MULTIPLICATIONS, _OUTPUTS = 200_000_000, 256
"""Of a product that is measured, beyond which fewer outputs are computed, in multiples of so many: another number than whole vectors
makes the plain product slower. It bounds the time per shape to about 0.15 s.
"""
_REPEATS, _SAMPLE_S = 3, 0.5e-3
"""The fastest sample counts. Each has as many calls as take this time together."""
_WORTHWHILE = 0.95
"""Share of the plain product's time below which the packed one is used."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""Of rows, [..., inputs], with a layer's weights: [..., outputs]."""
Choose = Callable[[nn.Linear, Product, int], Sequence[bool]]
"""Of a layer, its packed product and the fewest rows that matter: whether the packed product is faster, for each of ``ROWS``."""


def pack(model: nn.Module, *, most_nbytes: int, least_rows: int = 1, choose: Choose | None = None) -> int:
    """Pack the float32 linear layers of ``model`` on a CPU for which that is faster, the largest first, while memory lasts.

    ``least_rows``: fewest rows of a product that matter. Layers of one shape are measured once (``choose``). Returns the bytes used.
    Does nothing without oneDNN or on other processors than x86.
    """
    taken = 0
    if not _has_kernel():
        return taken
    chosen: dict[tuple[int, ...], Sequence[bool]] = {}
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in sorted(layers, key=lambda layer: layer.weight.nbytes, reverse=True):
        weight = layer.weight
        fits = LEAST_NBYTES <= weight.nbytes <= most_nbytes - taken
        if not fits or weight.dtype != torch.float32 or weight.device.type != "cpu":
            continue
        shape = tuple(weight.shape)
        if shape in chosen and not any(chosen[shape]):
            continue
        packed = PackedProduct(layer)
        if shape not in chosen:
            chosen[shape] = (choose or faster_packed)(layer, packed, least_rows)
        if any(chosen[shape]):
            taken += weight.nbytes
            # On the instance, which keeps hooks, names and parameters.
            layer.forward = _ByRows(layer, packed, chosen[shape])  # type: ignore[method-assign, assignment]
    return taken


@torch.inference_mode()
def faster_packed(layer: nn.Linear, packed: Product, least_rows: int) -> list[bool]:
    """Measure both products, in turns, for each of ``ROWS``. Where only fewer rows than ``least_rows`` come, packing counts as slower."""
    faster: list[bool] = []
    for rows, most_rows in zip(ROWS, _MOST_ROWS, strict=True):
        if most_rows < least_rows:
            faster.append(False)
            continue
        outputs = max(1, _MULTIPLICATIONS // (rows * layer.in_features * _OUTPUTS)) * _OUTPUTS
        whole = outputs >= layer.out_features
        part = layer if whole else _first_outputs(layer, outputs)
        products = part, packed if whole else PackedProduct(part)
        plain_s, packed_s = _fastest_s(products, rows, layer.in_features)
        faster.append(packed_s < _WORTHWHILE * plain_s)
    return faster


def _fastest_s(products: Sequence[Product], rows: int, inputs: int) -> list[float]:
    hidden = torch.full((rows, inputs), 0.5)

    def sample_s(product: Product, times: int) -> float:
        began_s = time.thread_time()  # others may have the processor meanwhile
        for _ in range(times):
            product(hidden)
        return (time.thread_time() - began_s) / times

    calls = [max(1, round(_SAMPLE_S / min(sample_s(product, 1), sample_s(product, 1)))) for product in products]
    samples = [[sample_s(*one) for one in zip(products, calls, strict=True)] for _ in range(_REPEATS)]
    return [min(one) for one in zip(*samples, strict=True)]


def _first_outputs(layer: nn.Linear, outputs: int) -> nn.Linear:
    part = nn.Linear(layer.in_features, outputs, bias=layer.bias is not None, device="meta")
    part.weight = nn.Parameter(layer.weight[:outputs], requires_grad=False)
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias[:outputs], requires_grad=False)
    return part


class PackedProduct:
    """The product of a float32 layer on a CPU, with a packed copy of its weights."""

    def __init__(self, layer: nn.Linear) -> None:
        self._weight, self._bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        self._packed: torch.Tensor | None = None
        self.load()

    def load(self) -> None:
        """Pack the weights as they are now."""
        self._packed = _ops()._reorder_linear_weight(self._weight, _PACKED_FOR_ROWS)  # noqa: SLF001

    def unload(self) -> None:
        """Free the copy, until ``load``."""
        self._packed = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _ops()._linear_pointwise(rows, self._packed, self._bias, "none", [], "")  # noqa: SLF001
        return made


class _ByRows:
    """The faster product of both, by the number of rows."""

    def __init__(self, layer: nn.Linear, packed: PackedProduct, faster: Sequence[bool]) -> None:
        self.packed = packed
        self._weight, self._bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        self._faster = faster

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._faster[bisect_left(_MOST_ROWS, rows.numel() // rows.shape[-1])]:
            return self.packed(rows)
        return linear(rows, self._weight, self._bias)


def load_packed(model: nn.Module) -> None:
    """Pack again what ``pack`` has packed, from weights that are there again."""
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
            yield module.forward.packed


def _ops() -> Any:
    """The kernels behind compiled models, which torch exposes only here."""
    return torch.ops.mkldnn


def _has_kernel() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and hasattr(_ops(), "_linear_pointwise")
        and hasattr(_ops(), "_reorder_linear_weight")
    )
