"""Attention of a whole pass over the blocks of its sequences, on GPUs, by kernels in Triton (``paged_kernel.py``)."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from math import ceil
from typing import Any

import torch

from triptych.families.base import Span

logger = logging.getLogger(__name__)

_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a program's product, tokens times heads that share a key: 16 is the least that a matrix unit takes."""
_TILE_NBYTES = 16 << 10
"""Keys of a step of the kernel, for one head: it holds a few such tiles in a multiprocessor's shared memory."""
_MOST_TILE, _LEAST_TILE = 64, 16
_WAVES = 2
"""Programs per multiprocessor below which keys are divided."""
_PARTS = (1, 4, 16)
"""Into how many parts keys may be divided. Each is a variant of the kernels, compiled at start."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The programs of a pass, each with some rows of one sequence."""

    sequences: torch.Tensor
    """[tiles] int32."""
    rows: torch.Tensor
    """[tiles] int32: the first row of each, counted in its sequence's rows."""
    product_rows: int


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Packed sequences in row order, and the blocks of each."""

    block_tokens: int
    query_starts: torch.Tensor
    """[sequences + 1] int32: the start of each sequence's rows, and the end of all."""
    lengths: torch.Tensor
    """[sequences] int32: positions of each, those of its rows included."""
    tables: torch.Tensor
    """[sequences, most blocks] int32."""
    tiles: Tiles
    most_length: int
    limits: torch.Tensor | None = None
    """[rows] int32: the last position that each row attends to, where it is not its own."""


def has_paged_kernel(device: torch.device) -> bool:
    """Whether ``paged_attention`` works on the device. The first call tries, and logs why not."""
    return device.type == "cuda" and _is_usable(device)


@cache
def _is_usable(device: torch.device) -> bool:
    try:
        layout = paged_layout([1], [1], [[0]], [()], 16, device, group=1)
        query, memory = torch.ones(1, 1, 1, 16, device=device), torch.ones(16, 1, 16, device=device)
        attended = paged_attention(layout, query, memory, memory, None, None)
    except Exception:  # triton raises many types: no triton, no compiler, a device that it does not know
        logger.warning("paged attention cannot be compiled, so sequences are gathered: that is slow", exc_info=True)
        return False
    if bool((attended == 1).all()):
        return True
    logger.warning("paged attention computes something else on %s, so sequences are gathered: that is slow", device)
    return False


def head_group(config: Any) -> int:
    """Number of a decoder's heads that share a key head."""
    return int(config.num_attention_heads // config.num_key_value_heads)


def product_rows(most: int, group: int) -> int:
    """Rows of a program's product, tokens times ``group`` heads, in a pass over sequences with at most ``most`` rows each."""
    return max(_FEW_ROWS if most * group <= _FEW_ROWS else _MANY_ROWS, _power_of_two(group))


def tiles_of(counts: Sequence[int], step: int) -> list[tuple[int, int]]:
    """The sequence and the first row of each program, which has up to ``step`` rows."""
    return [(at, row) for at, count in enumerate(counts) for row in range(0, count, step)]


def paged_layout(
    counts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    bidirectional: Sequence[Sequence[Span]],
    block_tokens: int,
    device: torch.device,
    *,
    group: int,
) -> PagedLayout:
    """The layout of sequences with ``counts`` rows each, whose ``bidirectional`` spans are seen whole from within. ``group`` heads share a
    key head. One transfer, from pinned memory on CUDA.
    """
    most = max(len(table) for table in tables)
    starts = [0, *accumulate(counts)]
    rows = product_rows(max(counts), group)
    tiles = tiles_of(counts, rows // group)
    padded = [slot for table in tables for slot in (*table, *[0] * (most - len(table)))]
    limits = _limits(counts, lengths, bidirectional) if any(bidirectional) else []
    parts = [starts, lengths, padded, [at for at, _ in tiles], [row for _, row in tiles], limits]
    packed = torch.tensor(
        [number for part in parts for number in part], dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    moved = torch.split(packed.to(device, non_blocking=True), [len(part) for part in parts])
    return PagedLayout(
        block_tokens,
        moved[0],
        moved[1],
        moved[2].view(len(counts), most),
        Tiles(moved[3], moved[4], rows),
        max(lengths),
        moved[5] if limits else None,
    )


def _limits(counts: Sequence[int], lengths: Sequence[int], bidirectional: Sequence[Sequence[Span]]) -> list[int]:
    """``PagedLayout.limits``."""
    all_limits: list[int] = []
    for count, length, spans in zip(counts, lengths, bidirectional, strict=True):
        first = length - count
        limits = list(range(first, length))
        for span in spans:
            end = min(span.start + span.tokens, length)
            for position in range(max(span.start, first), end):
                limits[position - first] = end - 1
        all_limits += limits
    return all_limits


def paged_attention(
    layout: PagedLayout,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Causal: query [1, heads, n, d] against keys and values [slots, kv heads, d] gives [1, n, heads, d].

    In a ``window`` a row attends to that many positions up to itself.
    """
    programs = len(layout.tiles.rows) * keys.shape[1]
    parts = _parts(programs, ceil(layout.most_length / _tile(keys)), query.device)
    return _attend(layout, query, keys, values, scaling, window, parts)


def compile_kernels(
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tokens: int,
    *,
    heads: int,
    windows: Collection[int | None],
    spans: bool,
) -> None:
    """Compile what passes over this memory need, [slots, kv heads, d] each, so that no request waits for it. That takes seconds, but
    triton keeps the results in a directory. ``spans``: prompts may have bidirectional ones. Raises what triton raises.
    """
    group = heads // keys.shape[1]
    for count in {1, _MANY_ROWS // group + 1}:
        table = [0] * -(-count // block_tokens)
        query = torch.zeros(1, heads, count, keys.shape[2], dtype=keys.dtype, device=keys.device)
        for seen in ((), (Span(0, count),)) if spans else ((),):
            layout = paged_layout([count], [count], [table], [seen], block_tokens, keys.device, group=group)
            for window, parts in product(windows, _PARTS):
                _attend(layout, query, keys, values, None, window, parts)


def _attend(
    layout: PagedLayout,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
    parts: int,
) -> torch.Tensor:
    """``paged_attention``, with keys divided into so many parts."""
    from triptych.engine.decoder import paged_kernel

    _, heads, count, size = query.shape
    kv_heads = keys.shape[1]
    rows = query[0].transpose(0, 1).contiguous()
    out = torch.empty_like(rows)
    padded = _padded(size)
    partial, sums = out, out
    if parts > 1:
        partial = torch.empty(count, heads, parts, padded, dtype=torch.float32, device=query.device)
        sums = torch.empty(count, heads, parts, 2, dtype=torch.float32, device=query.device)
    launch: Any = paged_kernel.attend[len(layout.tiles.rows), kv_heads, parts]
    launch(
        rows,
        keys,
        values,
        out,
        partial,
        sums,
        layout.query_starts,
        layout.lengths,
        layout.tables,
        layout.lengths if layout.limits is None else layout.limits,
        layout.tiles.sequences,
        layout.tiles.rows,
        size**-0.5 if scaling is None else scaling,
        layout.tables.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD=size,
        HEAD_PADDED=padded,
        BLOCK_TOKENS=layout.block_tokens,
        ROWS=layout.tiles.product_rows,
        TILE=_tile(keys),
        WINDOW=window or 0,
        HAS_LIMITS=layout.limits is not None,
        PARTS=parts,
        PRECISION="ieee",
        num_warps=4,
    )
    if parts > 1:
        combine: Any = paged_kernel.combine[(count * heads,)]
        combine(partial, sums, out, HEAD=size, HEAD_PADDED=padded, PARTS=parts, num_warps=2)
    return out[None]


def _tile(keys: torch.Tensor) -> int:
    """Keys of a step of the kernel."""
    fits = _TILE_NBYTES // (_padded(keys.shape[2]) * keys.element_size())
    return min(_MOST_TILE, max(_LEAST_TILE, fits))


def _padded(size: int) -> int:
    return max(16, _power_of_two(size))


def _parts(programs: int, tiles: int, device: torch.device) -> int:
    """The smallest of ``_PARTS`` that gives every multiprocessor work, if there are so many tiles of keys."""
    missing = min(_WAVES * _multiprocessors(device) / programs, tiles)
    return next((parts for parts in _PARTS if parts >= missing), _PARTS[-1])


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
