"""Cross-attention of a prompt's text to its items' states, whose keys and values are separate from the tokens'.

Registered with transformers under its own name, for cross-attention layers only; the pass is the keyword argument
``cross``, which decoder layers pass through. The keys and values of a request's states are computed once and cached in
bounded memory (the *image cache* of HydraInfer). What does not fit is recomputed in each pass: slower, but never
refused.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

CROSS_ATTENTION = "triptych_cross"

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [kv heads, states, head size]."""
Project = Callable[[Any, torch.Tensor], KeysValues]
"""Computes the keys and values of a cross-attention layer from states [n, hidden]."""


class Zone(NamedTuple):
    """Zone of a prompt: from position ``first`` up to the next zone, text attends to states ``begin`` to ``end``."""

    first: int
    begin: int
    end: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class CrossStates:
    """The states [n, hidden] of one prompt and the zones that attend to them.

    The first zone starts at position 0; the last covers all generated tokens.
    """

    states: torch.Tensor
    zones: tuple[Zone, ...]
    kept: dict[int, KeysValues] | None = None
    """Keys and values by layer, if there was room."""


@dataclass(frozen=True, slots=True)
class CrossPart:
    """Rows ``row`` to ``row + count`` of a pass attend to states ``begin`` to ``end``."""

    row: int
    count: int
    states: CrossStates
    begin: int
    end: int


class CrossCache:
    """Cached keys and values of states, at most ``nbytes``; freed with their prompt's ``CrossStates``."""

    def __init__(self, *, layers: int, project: Project, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._layers = layers
        self._project = project
        self.used_nbytes = 0

    def project(self, layer: Any, states: CrossStates) -> KeysValues:
        """Keys and values of a cross-attention layer, cached if there is room for all layers'."""
        if states.kept is not None and layer.layer_idx in states.kept:
            return states.kept[layer.layer_idx]
        keys, values = self._project(layer, states.states)
        if states.kept is None:
            self._keep(states, self._layers * (keys.nbytes + values.nbytes))
        if states.kept is not None:
            states.kept[layer.layer_idx] = keys, values
        return keys, values

    def _keep(self, states: CrossStates, nbytes: int) -> None:
        if self.used_nbytes + nbytes > self.nbytes:
            return
        states.kept = {}
        self.used_nbytes += nbytes
        weakref.finalize(states, self._give, nbytes)

    def _give(self, nbytes: int) -> None:
        self.used_nbytes -= nbytes


@dataclass(frozen=True, slots=True)
class CrossPass:
    """Cross-attention of one pass. Rows in no part attend to nothing."""

    cache: CrossCache
    parts: Sequence[CrossPart] = field(default_factory=tuple)


def cross_parts(states: CrossStates, first: int, count: int, row: int) -> list[CrossPart]:
    """The parts of a pass, zone by zone, whose rows from ``row`` on are a prompt's positions from ``first`` on."""
    parts: list[CrossPart] = []
    ends = [zone.first for zone in states.zones[1:]] + [first + count]
    for zone, end in zip(states.zones, ends, strict=True):
        begin, stop = max(first, zone.first), min(first + count, end)
        if begin < stop:
            parts.append(CrossPart(row + begin - first, stop - begin, states, zone.begin, zone.end))
    return parts


def cross_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,  # noqa: ARG001 - transformers' signature
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    *,
    cross: CrossPass,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of cross-attention layers: query [1, heads, n, d]. Returns [1, n, heads, d].

    ``key`` and ``value`` are of a dummy state, present only so that the layer runs.
    """
    heads, kv_heads, head_size = query.shape[1], key.shape[1], query.shape[3]
    groups = heads // kv_heads
    out = query.new_zeros(query.shape[2], heads, head_size)
    for part in cross.parts:
        keys, values = cross.cache.project(module, part.states)
        rows = slice(part.row, part.row + part.count)
        # Heads that share a key are rows of one attention without a mask.
        attended = scaled_dot_product_attention(
            query[0, :, rows].reshape(1, kv_heads, groups * part.count, head_size),
            keys[None, :, part.begin : part.end],
            values[None, :, part.begin : part.end],
            scale=scaling,
        )
        out[rows] = attended.reshape(heads, part.count, head_size).transpose(0, 1)
    return out[None], None


AttentionInterface.register(CROSS_ATTENTION, cross_attention)
