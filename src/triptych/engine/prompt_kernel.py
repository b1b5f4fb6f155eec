"""Attention of the rows of a prompt, compiled for the processor as ``cpu_kernels`` are: float32, on a CPU, one thread for each call.

The rows of one key head are computed in blocks: a product with the keys, a softmax, and a product with the values. Keys are transposed once per head, so that
both products are made of the same small one, whose result stays in registers (``vectors.small_product``).
"""

import numpy as np

from triptych.engine.vectors import (
    LANES,
    PRODUCT_ROWS,
    PRODUCT_VECTORS,
    Floats,
    Integers,
    compiled,
    each,
    exponential,
    greater,
    greatest,
    less,
    load,
    plus,
    small_product,
    store,
    total,
)

_TILE = 64
"""Positions whose part of a block's products is computed together, from the first cache."""
_MOST_BLOCK_ROWS = 48
"""Most rows of one head in a block: a multiple of the small product's."""
_BLOCK_NBYTES = 512 << 10
"""Bytes of a block's scores, which the second cache should hold."""
_ZERO, _ONE, _NEVER = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


def _up_to_multiple_of(number: int, multiple: int) -> int:
    return (number + multiple - 1) // multiple * multiple


_up_to_multiple = compiled(_up_to_multiple_of)


def _rows_per_block_of(group: int, length: int) -> int:
    """Rows of a sequence that are computed together, with all ``group`` heads that share a key, before so many positions."""
    fits = _BLOCK_NBYTES // (4 * length) // PRODUCT_ROWS * PRODUCT_ROWS
    return max(1, min(_MOST_BLOCK_ROWS, fits) // group)


rows_per_block = compiled(_rows_per_block_of)


def _product_of(
    a: Floats,
    a_at: int,
    a_stride: int,
    b: Floats,
    b_at: int,
    b_stride: int,
    c: Floats,
    c_at: int,
    c_stride: int,
    rows: int,
    columns: int,
    depth: int,
    adds: bool,
) -> None:
    """``small_product`` of any multiples of its rows and of the lanes."""
    for row in range(0, rows, PRODUCT_ROWS):
        from_row, to_row = a_at + row * a_stride, c_at + row * c_stride
        at = 0
        while at + PRODUCT_VECTORS * LANES <= columns:
            small_product(
                a, from_row, a_stride, b, b_at + at, b_stride, c, to_row + at, c_stride, depth, adds, PRODUCT_VECTORS
            )
            at += PRODUCT_VECTORS * LANES
        while at + 2 * LANES <= columns:
            small_product(a, from_row, a_stride, b, b_at + at, b_stride, c, to_row + at, c_stride, depth, adds, 2)
            at += 2 * LANES
        while at < columns:
            small_product(a, from_row, a_stride, b, b_at + at, b_stride, c, to_row + at, c_stride, depth, adds, 1)
            at += LANES


_product = compiled(_product_of, any_order=False)


def _transpose_keys_of(keys: Floats, kv_head: int, slots: Integers, transposed: Floats) -> None:
    """Transpose keys to tiles of [size, tile], with zeros up to whole vectors behind the last position."""
    size = keys.shape[2]
    for first in range(0, len(slots), _TILE):
        count, base = min(_TILE, len(slots) - first), first * size
        for at in range(count):
            slot = slots[first + at]
            for column in range(size):
                transposed[base + column * _TILE + at] = keys[slot, kv_head, column]
        for column in range(size):
            for at in range(count, _up_to_multiple(count, LANES)):
                transposed[base + column * _TILE + at] = _ZERO


_transpose_keys = compiled(_transpose_keys_of)


def _copy_values_of(values: Floats, kv_head: int, slots: Integers, copied: Floats, padded: int) -> None:
    """Copy values to [positions, padded], with zeros behind each."""
    size = values.shape[2]
    for at in range(len(slots)):
        slot = slots[at]
        for column in range(size):
            copied[at * padded + column] = values[slot, kv_head, column]
        for column in range(size, padded):
            copied[at * padded + column] = _ZERO


_copy_values = compiled(_copy_values_of)


def _exponentials_of(scores: Floats, begin: int, end: int) -> np.float32:
    """Exponentiate whole vectors, less the greatest of their numbers, in place. Returns the sum."""
    most = each(_NEVER)
    for at in range(begin, end, LANES):
        most = greater(load(scores, at), most)
    subtracted, sums = each(greatest(most)), each(_ZERO)
    for at in range(begin, end, LANES):
        value = exponential(less(load(scores, at), subtracted))
        store(scores, at, value)
        sums = plus(sums, value)
    total_weight: np.float32 = total(sums)
    return total_weight


_exponentials = compiled(_exponentials_of, any_order=False)


def _fill_with(array: Floats, begin: int, end: int, value: np.float32) -> None:
    for at in range(begin, end):  # Numba takes a second to compile what assigns to slices
        array[at] = value


_fill = compiled(_fill_with)


def _weigh_of(scores: Floats, first: int, begin: int, end: int, last: int) -> np.float32:
    """Softmax, but for its division, of what is from ``begin`` to ``end`` of a row from ``first`` to ``last``; all else gets no weight. Returns the sum."""
    whole_begin, whole_end = first + (begin - first) // LANES * LANES, first + _up_to_multiple(end - first, LANES)
    _fill(scores, whole_begin, begin, _NEVER)
    _fill(scores, end, whole_end, _NEVER)
    total_weight = _exponentials(scores, whole_begin, whole_end)
    _fill(scores, first, begin, _ZERO)
    _fill(scores, end, last, _ZERO)
    return total_weight


_weigh = compiled(_weigh_of)


def _attend_prompt(
    query: Floats,
    keys: Floats,
    values: Floats,
    slots: Integers,
    window: int,
    scaling: np.float32,
    begin: int,
    end: int,
    attended: Floats,
) -> None:
    """Attention of the last rows of a sequence, each to the positions up to itself: the first heads of ``query``, [rows, heads or more, size], to
    ``attended`` [rows, heads, size].

    Keys and values are [all slots, kv heads, size], and ``slots`` those of the positions that any row attends to. A row attends to its last ``window`` positions,
    itself included, if that is not 0. Of (kv heads * blocks of rows) units, those from ``begin`` to ``end`` are computed.
    """
    kv_heads, size = keys.shape[1], keys.shape[2]
    rows, group, length = attended.shape[0], attended.shape[1] // kv_heads, len(slots)
    block_rows = rows_per_block(group, length)
    blocks = (rows + block_rows - 1) // block_rows
    most = _up_to_multiple(min(rows, block_rows) * group, PRODUCT_ROWS)
    stride, padded = _up_to_multiple(length, _TILE), _up_to_multiple(size, LANES)
    transposed, copied = np.empty(stride * size, np.float32), np.empty(length * padded, np.float32)
    asked, scores = np.zeros(most * size, np.float32), np.empty(most * stride, np.float32)
    sums, totals = np.empty(most * padded, np.float32), np.empty(most, np.float32)
    copied_head = -1
    for unit in range(begin, end):
        kv_head, row = unit // blocks, unit % blocks * block_rows
        if kv_head != copied_head:
            copied_head = kv_head
            _transpose_keys(keys, kv_head, slots, transposed)
            _copy_values(values, kv_head, slots, copied, padded)
        count, first = min(block_rows, rows - row), length - rows + row
        together, first_head = count * group, kv_head * group
        for at in range(together):
            for column in range(size):
                asked[at * size + column] = query[row + at // group, first_head + at % group, column] * scaling
        whole = _up_to_multiple(together, PRODUCT_ROWS)  # the rows behind are computed and not used
        last = first + count
        start = max(0, first + 1 - window) // _TILE * _TILE if window else 0
        for tile in range(start, last, _TILE):
            columns = min(_TILE, _up_to_multiple(last - tile, LANES))
            _product(asked, 0, size, transposed, tile * size, _TILE, scores, tile, stride, whole, columns, size, False)
        for at in range(together):
            base, visible = at * stride, first + at // group + 1
            oldest = max(0, visible - window) if window else 0
            totals[at] = _weigh(scores, base + start, base + oldest, base + visible, base + last)
        for tile in range(start, last, _TILE):
            depth = min(_TILE, last - tile)
            _product(
                scores, tile, stride, copied, tile * padded, padded, sums, 0, padded, whole, padded, depth, tile > start
            )
        for at in range(together):
            share = _ONE / totals[at]
            for column in range(size):
                attended[row + at // group, first_head + at % group, column] = sums[at * padded + column] * share


attend_prompt = compiled(_attend_prompt)


def prepare() -> None:
    """Compile all, or load what is in the cache, as ``cpu_kernels.prepare``."""
    heads, positions = np.ones((1, 3, 2), np.float32), np.zeros(1, np.int64)
    memory = np.ones((1, 1, 2), np.float32)
    attend_prompt(heads, memory, memory.copy(), positions, 0, np.float32(1.0), 0, 1, np.empty((1, 1, 2), np.float32))
    rows_per_block(1, 1)
