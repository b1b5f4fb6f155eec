"""The CUDA code paths, as far as they run without a GPU: paged attention, and decoding by CUDA graphs.

The kernel is written in torch; a replay runs the same Python again on the same buffers. ``tests/gpu`` tests both on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from triptych.engine.decoder import attention, packed_runner, setup
from triptych.engine.decoder.paged_attention import PagedLayout


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
    """From now on engines take the code paths of CUDA."""
    graphs = FakeGraphs()
    monkeypatch.setattr(attention, "paged_attention", reference_attention)
    monkeypatch.setattr(setup, "has_paged_kernel", lambda device: True)
    monkeypatch.setattr(setup, "compile_kernels", lambda *memory, **options: None)
    monkeypatch.setattr(setup, "_BLOCK_TOKENS", block_tokens)
    for module in (setup, packed_runner):
        monkeypatch.setattr(module, "cuda_graph_capture", graphs.capturer)
    return graphs


def reference_attention(
    layout: PagedLayout,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """``paged_attention`` in torch, one sequence after the other. Each row of a sequence must be in exactly one tile."""
    out = torch.zeros_like(query[0].transpose(0, 1))
    rows_of: dict[int, set[int]] = {}
    step = layout.tiles.product_rows // (query.shape[1] // keys.shape[1])
    starts: list[int] = layout.query_starts.tolist()
    for at, first in zip(layout.tiles.sequences.tolist(), layout.tiles.rows.tolist(), strict=True):
        rows = set(range(first, min(first + step, starts[at + 1] - starts[at])))
        assert not rows & rows_of.setdefault(at, set())
        rows_of[at] |= rows
    assert sum(map(len, rows_of.values())) == starts[-1] <= len(out)
    for at, (begin, end) in enumerate(pairwise(starts)):
        length = int(layout.lengths[at])
        assert end - begin <= length <= layout.most_length
        blocks = layout.tables[at, : -(-length // layout.block_tokens)].tolist()
        slots = [block * layout.block_tokens + inside for block in blocks for inside in range(layout.block_tokens)]
        k, v = (memory[slots[:length]].transpose(0, 1) for memory in (keys, values))
        positions = torch.arange(length - (end - begin), length, device=query.device)[:, None]
        last = positions if layout.limits is None else layout.limits[begin:end, None]
        columns = torch.arange(length, device=query.device)[None]
        seen = columns <= last
        if window is not None:
            seen &= columns > positions - window
        options: Any = {"attn_mask": seen, "scale": scaling, "enable_gqa": True}
        attended = torch.nn.functional.scaled_dot_product_attention(query[:, :, begin:end], k[None], v[None], **options)
        out[begin:end] = attended[0].transpose(0, 1)
    return out[None]
