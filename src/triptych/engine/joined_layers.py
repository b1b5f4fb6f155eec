"""Linear layers that take the same rows, computed as one layer: a larger product takes less time than several, and fewer calls."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """A layer whose outputs are those of ``layers``, in their order; all of them have a bias, or none.

    It shares their weights: these are moved into one tensor, if they do not follow each other in memory yet.
    """
    first = layers[0]
    outputs = sum(one.out_features for one in layers)
    made = nn.Linear(first.in_features, outputs, bias=first.bias is not None, device="meta")
    made.weight = nn.Parameter(_together([one.weight for one in layers]), requires_grad=False)
    if first.bias is not None:
        made.bias = nn.Parameter(_together([one.bias for one in layers]), requires_grad=False)
    return made


def _together(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    rows = [len(one) for one in parameters]
    if not all(_follows(one, other) for one, other in pairwise(parameters)):
        moved = torch.cat([one.data for one in parameters])
        for one, part in zip(parameters, torch.split(moved, rows), strict=True):
            one.data = part
    first = parameters[0].data
    return first.as_strided((sum(rows), *first.shape[1:]), first.stride())


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and one.is_contiguous() and other.is_contiguous() and one.data_ptr() + one.nbytes == other.data_ptr()
