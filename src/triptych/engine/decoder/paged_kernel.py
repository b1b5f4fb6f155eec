"""Triton kernels of paged attention, for ``paged_attention.py``. Importing this needs triton, which torch brings along
for GPUs.

They are flash attention over the blocks of each sequence (FlashAttention-2, sections 3.1 and 3.2). A program has a few
rows of one sequence and all heads that share a key head. It goes over the keys in tiles, and keeps a running maximum
and sum.

With few rows, as in a decode step, the keys of a sequence are divided among several programs. A second kernel combines
what they found (Flash-Decoding).
"""

from typing import Any

import triton
import triton.language as tl

_LOG2_E: Any = tl.constexpr(1.4426950408889634)
_LAYOUT = ("starts", "lengths", "tables", "limits", "tile_sequences", "tile_rows")
"""Parts of one allocation: where they begin differs from pass to pass, and must not lead to another variant of a kernel."""


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=_LAYOUT)
def attend(
    query,
    keys,
    values,
    out,
    partial,
    partial_sums,
    starts,
    lengths,
    tables,
    limits,
    tile_sequences,
    tile_rows,
    scale,
    table_width,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of the rows of one tile and the heads of one key head, to one of ``PARTS`` parts of the keys.

    ``ROWS`` of the product are tokens times heads. ``WINDOW`` 0 is none. ``limits`` [n]: the last position that each row attends to, if
    that is not its own. With several parts, sums that are not divided yet go to ``partial`` and ``partial_sums``.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    sequence = tl.load(tile_sequences + tile)
    first_row = tl.load(tile_rows + tile)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)

    at = tl.arange(0, ROWS)
    row = first_row + at // GROUP
    head = kv_head * GROUP + at % GROUP
    is_row = (at < ROWS // GROUP * GROUP) & (row < count)
    position = length - count + row
    dims = tl.arange(0, HEAD_PADDED)
    is_dim = dims < HEAD
    rows = (start + row).to(tl.int64) * HEADS + head
    q = tl.load(query + rows[:, None] * HEAD + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    last = position
    if HAS_LIMITS:
        last = tl.load(limits + start + row, mask=is_row, other=0)

    end = tl.max(tl.where(is_row, last, 0)) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - count + first_row - WINDOW + 1, 0) // TILE * TILE
    if PARTS > 1:
        tiles = tl.cdiv(end - begin, TILE)
        share = tl.cdiv(tiles, PARTS) * TILE
        begin = begin + part * share
        end = tl.minimum(end, begin + share)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    for first in range(begin, end, TILE):
        place = first + tl.arange(0, TILE)
        is_place = place < end
        block = tl.load(tables + sequence * table_width + place // BLOCK_TOKENS, mask=is_place, other=0)
        slot = (block.to(tl.int64) * BLOCK_TOKENS + place % BLOCK_TOKENS) * KV_HEADS + kv_head
        k = tl.load(keys + slot[None, :] * HEAD + dims[:, None], mask=is_place[None, :] & is_dim[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * (scale * _LOG2_E)
        seen = is_place[None, :] & (place[None, :] <= last[:, None])
        if WINDOW > 0:
            seen = seen & (place[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(top - base)
        v = tl.load(values + slot[:, None] * HEAD + dims[None, :], mask=is_place[:, None] & is_dim[None, :], other=0.0)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = higher

    if PARTS == 1:
        attended = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        place = rows[:, None] * HEAD + dims[None, :]
        tl.store(out + place, attended.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])
    else:
        where = rows * PARTS + part
        tl.store(partial + where[:, None] * HEAD_PADDED + dims[None, :], sums, mask=is_row[:, None])
        tl.store(partial_sums + where * 2, top, mask=is_row)
        tl.store(partial_sums + where * 2 + 1, total, mask=is_row)


@triton.jit
def combine(
    partial,
    partial_sums,
    out,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Combine one row and head: what the parts of its keys found, weighted by their sums."""
    row = tl.program_id(0).to(tl.int64)
    parts = row * PARTS + tl.arange(0, PARTS)
    dims = tl.arange(0, HEAD_PADDED)
    tops = tl.load(partial_sums + parts * 2)
    totals = tl.load(partial_sums + parts * 2 + 1)
    weights = tl.exp2(tops - tl.max(tops, 0))
    sums = tl.load(partial + parts[:, None] * HEAD_PADDED + dims[None, :])
    attended = tl.sum(sums * weights[:, None], 0) / tl.sum(totals * weights, 0)
    tl.store(out + row * HEAD + dims, attended.to(out.dtype.element_ty), mask=dims < HEAD)
