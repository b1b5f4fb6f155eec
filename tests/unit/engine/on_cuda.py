"""The CUDA code paths, as far as they run without a GPU: paged attention, and decoding by CUDA graphs.

The kernel is written in torch with the arguments of ``torch.nn.attention.varlen.varlen_attn``; a replay runs the same
Python again on the same buffers. ``tests/gpu`` tests both on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from triptych.engine.decoder import paged_attention as paged
from triptych.engine.decoder import setup


@dataclass
class FakeGraphs:
    """How often a graph was captured and replayed."""

    captured: int = 0
    replayed: int = 0
    refuse: bool = field(default=False)

    def capturer(self, device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
        del device

        def capture(work: Callable[[], None]) -> Callable[[], None]:
            if self.refuse:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.captured += 1
            work()

            def replay() -> None:
                self.replayed += 1
                work()

            return replay

        return capture


def as_on_cuda(monkeypatch: pytest.MonkeyPatch, *, block_tokens: int) -> FakeGraphs:
    """From now on engines take the code paths of CUDA in half precision."""
    graphs = FakeGraphs()
    monkeypatch.setattr(paged, "_kernel", lambda: varlen_attn)
    monkeypatch.setattr(setup, "has_paged_kernel", lambda device, dtype: True)
    monkeypatch.setattr(setup, "FLASH_BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(setup, "cuda_graph_capture", graphs.capturer)
    return graphs


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """[rows, heads, d] against pages [pages, page, kv heads, d], causal, the last row of each sequence at its end."""
    assert cu_seq_k is None
    assert enable_gqa == (query.shape[1] != key.shape[2])
    page = key.shape[1]
    assert max_k <= block_table.shape[1] * page
    out = torch.empty_like(query)
    starts: list[int] = cu_seq_q.tolist()
    for at, (begin, end) in enumerate(pairwise(starts)):
        length = int(seqused_k[at])
        assert end - begin <= max_q
        assert end - begin <= length <= max_k
        pages = block_table[at, : -(-length // page)].long()
        k, v = (memory[pages].flatten(0, 1)[:length].transpose(0, 1) for memory in (key, value))
        rows = torch.arange(length - (end - begin), length)[:, None]
        columns = torch.arange(length)[None]
        seen = columns <= rows
        if window_size[0] >= 0:
            seen &= columns >= rows - window_size[0]
        options: Any = {"attn_mask": seen, "scale": scale, "enable_gqa": enable_gqa}
        one = query[begin:end].transpose(0, 1)[None]
        out[begin:end] = torch.nn.functional.scaled_dot_product_attention(one, k[None], v[None], **options)[
            0
        ].transpose(0, 1)
    return out
