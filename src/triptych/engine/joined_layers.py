"""Linear layers that take the same rows, computed as one layer: a larger product takes less time than several, and fewer calls."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import linear

Weights = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
"""Weights of the parts of a layer: [outputs, inputs], and the biases [outputs] if there are any."""
Outputs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Function from rows [..., inputs], weights [outputs, inputs] and a bias to outputs [..., outputs]."""


class JoinedLinear(nn.Module):
    """A layer whose outputs are those of ``parts``, in their order. It has no weights of its own: theirs stay where they are."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        """Join ``parts``, which all have a bias or none."""
        super().__init__()
        self.parts = tuple(parts)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs]."""
        return outputs_of(weights_of(self), rows, linear)


Layer = nn.Linear | JoinedLinear


def parts_of(layer: Layer) -> tuple[nn.Linear, ...]:
    """The layers that have the weights."""
    return layer.parts if isinstance(layer, JoinedLinear) else (layer,)


def nbytes_of(layer: Layer) -> int:
    """Bytes of the weights."""
    return sum(part.weight.nbytes for part in parts_of(layer))


def weights_of(layer: Layer) -> Weights:
    return [(part.weight.detach(), None if part.bias is None else part.bias.detach()) for part in parts_of(layer)]


def outputs_of(weights: Weights, rows: torch.Tensor, product: Outputs) -> torch.Tensor:
    """Outputs by a product for each part."""
    outputs = [product(rows, weight, bias) for weight, bias in weights]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def together(weights: Weights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights of all parts in one tensor: a copy, where there are several."""
    if len(weights) == 1:
        return weights[0]
    biases = [bias for _, bias in weights if bias is not None]
    return torch.cat([weight for weight, _ in weights]), torch.cat(biases) if biases else None


def first_outputs(layer: Layer, count: int) -> JoinedLinear:
    """A layer with the first ``count`` outputs only, of the same weights."""
    parts = list[nn.Linear]()
    for layer_part in parts_of(layer):
        if count <= 0:
            break
        part = nn.Linear(
            layer_part.in_features, min(count, layer_part.out_features), bias=layer_part.bias is not None, device="meta"
        )
        part.weight = nn.Parameter(layer_part.weight[:count], requires_grad=False)
        if layer_part.bias is not None:
            part.bias = nn.Parameter(layer_part.bias[:count], requires_grad=False)
        parts.append(part)
        count -= layer_part.out_features
    return JoinedLinear(parts)
