"""Attention of encoders on a CPU, in float32: by products where that is faster (``product_attention``), else torch's.

It is registered with transformers under its own name, with the masks of torch's attention.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from triptych.engine.product_attention import is_faster, is_worth_it, product_attention

PRODUCT_ATTENTION = "triptych_products"
_TORCHS = "sdpa"
_HEADS, _HEAD_SIZE, _ROWS = 12, 64, 512
"""Usual ones: what is faster is a matter of the processor."""


def attend_by_products(model: nn.Module) -> None:
    """Let the layers of a float32 encoder on a CPU that use torch's attention use products instead, if they are faster on this processor."""
    if not is_faster(_HEADS, 1, _HEAD_SIZE, rows=_ROWS, is_causal=False):
        return
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == _TORCHS:
            config._attn_implementation = PRODUCT_ATTENTION  # noqa: SLF001 - transformers' documented switch


def encoder_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a layer: query [batch, heads, n, size], key and value [batch, kv heads, length, size].

    Returns [batch, n, heads, size]. It is torch's where there is a mask, the same query for all of a batch, or little to compute.
    """
    batch, heads, count, size = query.shape
    kv_heads, length = key.shape[1:3]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    simple = attention_mask is None and not causal and options.get("position_bias") is None and len(key) == batch
    if not simple or not is_worth_it(heads // kv_heads, count, length, size):
        done = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **options
        )
        return done[0], None
    scale = size**-0.5 if scaling is None else scaling
    attended = [
        product_attention(rows.view(kv_heads, -1, count, size), keys, values, scaling=scale).reshape(heads, count, size)
        for rows, keys, values in zip(query.contiguous(), key, value, strict=True)
    ]
    return torch.stack(attended).transpose(1, 2).contiguous(), None


AttentionInterface.register(PRODUCT_ATTENTION, encoder_attention)
AttentionMaskInterface.register(PRODUCT_ATTENTION, sdpa_mask)
