"""CPU linear layers with a second copy of their weights, in oneDNN's packed layout for few rows.

``torch.nn.functional.linear`` repacks float32 weights in each call, which a few rows do not repay: 8 rows take up to
twice as long as necessary, 32 a third longer. A single row, and very many, are not slower. So both layouts are kept,
within bounded memory.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

LEAST_NBYTES = 1 << 20
"""Least size of a layer: for smaller ones the call costs more than it saves."""
_ROWS = 32
"""Row count that the layout is optimized for; it works for others."""
_MOST_ROWS = 512


def pack(model: nn.Module, *, most_nbytes: int, least_nbytes: int = LEAST_NBYTES) -> int:
    """Pack the float32 linear layers of ``model`` on a CPU, the largest first, while memory lasts.

    Returns the bytes used. Does nothing without oneDNN or on other processors than x86.
    """
    taken = 0
    if not _has_kernel():
        return taken
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in sorted(layers, key=lambda layer: layer.weight.nbytes, reverse=True):
        weight = layer.weight
        fits = least_nbytes <= weight.nbytes <= most_nbytes - taken
        if fits and weight.dtype == torch.float32 and weight.device.type == "cpu":
            taken += weight.nbytes
            # On the instance, which keeps hooks, names and parameters.
            layer.forward = _Packed(weight, layer.bias)  # type: ignore[method-assign, assignment]
    return taken


class _Packed:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        self._packed: torch.Tensor = _ops()._reorder_linear_weight(self._weight, _ROWS)  # noqa: SLF001

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if not 1 < rows.numel() // rows.shape[-1] <= _MOST_ROWS:
            return linear(rows, self._weight, self._bias)
        made: torch.Tensor = _ops()._linear_pointwise(rows, self._packed, self._bias, "none", [], "")  # noqa: SLF001
        return made


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
