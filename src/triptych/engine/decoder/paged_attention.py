"""Torch's paged attention kernel for a whole pass on CUDA, where it exists."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

FLASH_BLOCK_TOKENS = 256
"""Torch's kernel takes blocks of multiples of this many tokens."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Packed sequences in row order, and the blocks of each."""

    block_tokens: int
    query_starts: torch.Tensor
    """[sequences + 1] int32: the start of each sequence's rows, and the end of all."""
    lengths: torch.Tensor
    """[sequences] int32: positions that its last row attends to."""
    tables: torch.Tensor
    """[sequences, most blocks] int32."""
    most_rows: int
    most_length: int


@cache
def _kernel() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


def has_paged_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``paged_attention`` works: CUDA, half precision, and a torch with the kernel."""
    return device.type == "cuda" and dtype in {torch.bfloat16, torch.float16} and _kernel() is not None


def paged_layout(
    counts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_tokens: int,
    device: torch.device,
) -> PagedLayout:
    """The layout of sequences with ``counts`` rows each. One transfer, from pinned memory on CUDA."""
    most = max(len(table) for table in tables)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    padded = [slot for table in tables for slot in (*table, *[0] * (most - len(table)))]
    packed = torch.tensor([*starts, *lengths, *padded], dtype=torch.int32, pin_memory=device.type == "cuda")
    moved = packed.to(device, non_blocking=True)
    n = len(counts)
    return PagedLayout(
        block_tokens,
        moved[: n + 1],
        moved[n + 1 : 2 * n + 1],
        moved[2 * n + 1 :].view(n, most),
        max(counts),
        max(lengths),
    )


def paged_attention(
    layout: PagedLayout,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Causal: query [1, heads, n, d] against keys and values [slots, kv heads, d] gives [1, n, heads, d]."""
    kernel = _kernel()
    if kernel is None:
        raise RuntimeError("there is no paged attention kernel here")
    pages = (-1, layout.block_tokens, *keys.shape[1:])
    attended: torch.Tensor = kernel(
        query[0].transpose(0, 1).contiguous(),
        keys.view(pages),
        values.view(pages),
        layout.query_starts,
        None,
        layout.most_rows,
        layout.most_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[1],
        seqused_k=layout.lengths,
        block_table=layout.tables,
    )
    return attended[None]
