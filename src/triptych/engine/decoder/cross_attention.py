"""Attention of a prompt's text to its items' states: keys and values that stand apart from those of the tokens.

Registered with transformers under a name of its own, for cross-attention layers only; the pass comes as the keyword
argument ``cross``, which decoder layers hand through. The keys and values of a request's states are computed once and
kept in memory of their own, bounded in bytes: the *image cache* of HydraInfer. What does not fit is computed for each
pass, which is slower and never refused.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

CROSS_ATTENTION = "triptych_cross"

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Each [kv heads, states, head size]."""


class Zone(NamedTuple):
    """From prompt position ``first`` on, up to the next zone, text attends to states ``begin`` to ``end``."""

    first: int
    begin: int
    end: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class CrossStates:
    """What the text of one prompt attends to: ``states`` [n, hidden], and from where on to which of them.

    The first zone is at position 0; the last goes on over everything that is generated.
    """

    states: torch.Tensor
    zones: tuple[Zone, ...]
    kept: dict[int, KeysValues] | None = None
    """By layer, where there was room."""


@dataclass(frozen=True, slots=True)
class CrossPart:
    """Rows ``row`` to ``row + count`` of a pass attend to states ``begin`` to ``end``."""

    row: int
    count: int
    states: CrossStates
    begin: int
    end: int


class CrossCache:
    """Keys and values of states, at most ``nbytes`` of them; they go when their prompt's ``CrossStates`` goes."""

    def __init__(self, *, layers: int, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._layers = layers
        self._used = 0

    @property
    def used_nbytes(self) -> int:
        return self._used

    def project(self, layer: Any, states: CrossStates) -> KeysValues:
        """The keys and values that a cross-attention layer makes of states, kept where there is room for all layers'."""
        if states.kept is not None and layer.layer_idx in states.kept:
            return states.kept[layer.layer_idx]
        shape = (len(states.states), layer.num_key_value_heads, layer.head_dim)
        keys = layer.k_norm(layer.k_proj(states.states).view(shape).transpose(0, 1))
        values = layer.v_proj(states.states).view(shape).transpose(0, 1)
        if states.kept is None:
            self._keep(states, self._layers * (keys.nbytes + values.nbytes))
        if states.kept is not None:
            states.kept[layer.layer_idx] = keys, values
        return keys, values

    def _keep(self, states: CrossStates, nbytes: int) -> None:
        if self._used + nbytes > self.nbytes:
            return
        states.kept = {}
        self._used += nbytes
        weakref.finalize(states, self._give, nbytes)

    def _give(self, nbytes: int) -> None:
        self._used -= nbytes


@dataclass(frozen=True, slots=True)
class CrossPass:
    """One pass: rows that are in no part attend to nothing."""

    cache: CrossCache
    parts: Sequence[CrossPart] = field(default_factory=tuple)


def cross_parts(states: CrossStates, first: int, count: int, row: int) -> list[CrossPart]:
    """The parts of a pass whose rows from ``row`` on are a prompt's positions from ``first`` on, zone by zone."""
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
    """The function that cross-attention layers call: query [1, heads, n, d]. Returns [1, n, heads, d].

    ``key`` and ``value`` are of one state that only stands there so that the layer runs.
    """
    heads, kv_heads, head_size = query.shape[1], key.shape[1], query.shape[3]
    groups = heads // kv_heads
    out = query.new_zeros(query.shape[2], heads, head_size)
    for part in cross.parts:
        keys, values = cross.cache.project(module, part.states)
        rows = slice(part.row, part.row + part.count)
        # The heads that share a key are rows of one attention: all of them see all of it.
        attended = scaled_dot_product_attention(
            query[0, :, rows].reshape(1, kv_heads, groups * part.count, head_size),
            keys[None, :, part.begin : part.end],
            values[None, :, part.begin : part.end],
            scale=scaling,
        )
        out[rows] = attended.reshape(heads, part.count, head_size).transpose(0, 1)
    return out[None], None


AttentionInterface.register(CROSS_ATTENTION, cross_attention)
