"""Attention over sequences that are packed one behind the other, each against its own extent of the KV cache.

It is registered with transformers under a name of its own and gets the batch as a keyword argument, which decoder
layers hand through: there is no global state, so several engines can live in one process.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from triptych.engine.kv import KvCache

PACKED_ATTENTION = "triptych_packed"


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of the pass: rows ``row`` to ``row + count`` are its positions from ``context`` on.

    ``slot`` is where its extent of the cache starts; positions before ``context`` lie there already.
    """

    row: int
    count: int
    slot: int
    context: int
    mask: torch.Tensor | None = field(default=None, compare=False)
    """[count, context + count], true where a row may look; None where plain causal or full attention is meant."""

    @property
    def length(self) -> int:
        return self.context + self.count


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One pass over ``segments``; ``slots`` [rows] says where each row's key and value go."""

    cache: KvCache
    segments: tuple[Segment, ...]
    slots: torch.Tensor


def segment(row: int, count: int, slot: int, context: int, device: torch.device) -> Segment:
    """A segment with the mask that it needs: a chunk in the middle of a prompt sees all before it, then causally."""
    mask = None
    if context and count > 1:
        mask = torch.ones(count, context + count, dtype=torch.bool, device=device).tril(context)
    return Segment(row, count, slot, context, mask)


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedBatch,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that decoder layers call: query [1, heads, n, d], key and value [1, kv heads, n, d].

    Returns [1, n, heads, d]. Writes the new keys and values to the cache first; doing so twice is harmless, which lets
    a failed pass be repeated.
    """
    refused = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
    if refused or attention_mask is not None:
        raise NotImplementedError(f"packed attention has no {refused or 'attention mask'}")
    keys, values = packed.cache.keys[module.layer_idx], packed.cache.values[module.layer_idx]
    keys.index_copy_(1, packed.slots, key[0])
    values.index_copy_(1, packed.slots, value[0])
    heads, kv_heads, head_size = query.shape[1], key.shape[1], query.shape[3]
    groups = heads // kv_heads
    out = query.new_empty(query.shape[2], heads, head_size)
    for part in packed.segments:
        rows = slice(part.row, part.row + part.count)
        # [kv heads, groups, rows, d]: the heads that share a key are one batch entry, so keys are never repeated.
        q = query[0, :, rows].reshape(kv_heads, groups, part.count, head_size)
        k = keys[:, None, part.slot : part.slot + part.length]
        v = values[:, None, part.slot : part.slot + part.length]
        if part.count == 1:
            attended = scaled_dot_product_attention(q.transpose(1, 2), k, v, scale=scaling).transpose(1, 2)
        else:
            attended = scaled_dot_product_attention(
                q,
                k.expand(-1, groups, -1, -1),
                v.expand(-1, groups, -1, -1),
                attn_mask=part.mask,
                is_causal=part.mask is None,
                scale=scaling,
            )
        out[rows] = attended.reshape(heads, part.count, head_size).transpose(0, 1)
    return out[None], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
