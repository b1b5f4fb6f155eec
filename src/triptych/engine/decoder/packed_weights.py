"""Linear layers on a CPU, kept a second time in the order in which oneDNN multiplies a few rows fastest.

``torch.nn.functional.linear`` hands float32 weights to a kernel that puts them in order again for each call, which a few
rows do not repay: 8 take up to twice as long as they have to, 32 a third longer. One row, and very many, are as fast as
they are. So both orders are kept, and how much memory that takes is bounded.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

LEAST_NBYTES = 1 << 20
"""Of a layer: with smaller ones the call itself costs more than it saves."""
_ROWS = 32
"""For which the order is chosen; it serves other numbers as well."""
_MOST_ROWS = 512


def pack(model: nn.Module, *, most_nbytes: int, least_nbytes: int = LEAST_NBYTES) -> int:
    """Let the float32 linear layers of ``model`` on a CPU multiply faster, the largest first, while memory lasts.

    Returns the bytes taken. Does nothing where torch was built without oneDNN, or for another processor than x86.
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
            # On the instance, so that hooks, names and parameters stay what they are.
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
    """The kernels behind compiled models; torch offers them under no other name."""
    return torch.ops.mkldnn


def _has_kernel() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and hasattr(_ops(), "_linear_pointwise")
        and hasattr(_ops(), "_reorder_linear_weight")
    )
