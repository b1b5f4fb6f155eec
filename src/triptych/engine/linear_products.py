"""The products of linear layers on a CPU, in float32: one layer's, by each of five kinds.

*Plain* is ``torch.nn.functional.linear``: MKL, which leaves AVX-512 unused on processors that are not Intel's. *oneDNN* has its own kernels
for the same weights. Both repack them in each call, which few rows do not repay. *Packed* has a second copy of the weights in oneDNN's layout.
*Joined* is the plain product of a copy of a joined layer's weights, in one piece (``joined_layers``). *Compiled* (``cpu_kernels.few_rows_product``) reads the plain weights once for up to eight rows. Which is faster depends on the processor as
well: ``fastest_products``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.nn.functional import linear

from triptych.engine.joined_layers import Layer, nbytes_of, outputs_of, together, weights_of
from triptych.engine.worker_threads import WorkerThreads

_PACKED_FOR_ROWS = 32
"""Row count that the layout is optimized for. Optimized for 8 or for 512 rows, no product took less time."""
_NBYTES_PER_THREAD = 4 << 20
"""Weights that take longer to read than another thread to begin."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""Product of rows, [..., inputs], with a layer's weights: [..., outputs]."""
Make = Callable[[Layer], Product]


class By(Enum):
    PLAIN = "plain"
    ONEDNN = "onednn"
    PACKED = "packed"
    JOINED = "joined"
    COMPILED = "compiled"


class PlainProduct:
    """The product of a layer, by torch."""

    def __init__(self, layer: Layer) -> None:
        self._weights = weights_of(layer)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return outputs_of(self._weights, rows, linear)


class OneDnnProduct:
    """The product of a float32 layer on a CPU, by oneDNN with its own weights."""

    def __init__(self, layer: Layer) -> None:
        self._weights = weights_of(layer)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return outputs_of(self._weights, rows, onednn_linear)


class CopyProduct(ABC):
    """The product of a float32 layer on a CPU, with a copy of its weights."""

    def __init__(self, layer: Layer) -> None:
        self._weights = weights_of(layer)
        self._bias: torch.Tensor | None = None
        self._copy: torch.Tensor | None = None
        self.load()

    def load(self) -> None:
        """Copy the weights as they are now."""
        weight, self._bias = together(self._weights)
        self._copy = self._copied(weight)

    def unload(self) -> None:
        """Free the copy, until ``load``."""
        self._copy = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._copy is None:
            raise AssertionError("the weights are unloaded")
        return self._product(rows, self._copy, self._bias)

    @abstractmethod
    def _copied(self, weight: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _product(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


class PackedProduct(CopyProduct):
    """Product by oneDNN, in its layout."""

    def _copied(self, weight: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = _ops()._reorder_linear_weight(weight, _PACKED_FOR_ROWS)  # noqa: SLF001
        return packed

    def _product(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return onednn_linear(rows, weight, bias)


class JoinedProduct(CopyProduct):
    """Product by torch, of a layer that has several parts."""

    def _copied(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def _product(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(rows, weight, bias)


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
        output = rows.new_empty(*rows.shape[:-1], self._outputs)
        flat = rows.reshape(-1, rows.shape[-1]).contiguous().numpy()
        product, first = output.view(-1, self._outputs).numpy(), 0
        for weight, bias in self._weights:
            self._compute(flat, weight, bias, product, first)
            first += len(weight)
        return output

    def _compute(self, flat: Any, weight: torch.Tensor, bias: torch.Tensor, product: Any, first: int) -> None:
        """Outputs from ``first`` on."""
        arrays = weight.numpy(), bias.numpy()
        pieces = self._threads.usable(self._pieces)
        if pieces < 2:
            self._kernel(flat, *arrays, 0, len(weight), product, first)
        else:
            ends = [len(weight) * number // pieces for number in range(pieces + 1)]
            self._threads.run(lambda begin, end: self._kernel(flat, *arrays, begin, end, product, first), ends)


def onednn_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Product of rows [..., inputs] with weights [outputs, inputs], contiguous, transposed or packed: [..., outputs].

    oneDNN makes, and keeps, a kernel for each shape, which takes a millisecond.
    """
    output: torch.Tensor = _ops()._linear_pointwise(rows, weight, bias, "none", [], "")  # noqa: SLF001
    return output


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
