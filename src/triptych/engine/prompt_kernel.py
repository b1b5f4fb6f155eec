"""Attention of the rows of a prompt, compiled for the processor by Numba: float32, on a CPU, one thread for each call.

Rows of one key head are computed in blocks: a product with the keys, a softmax, and a product with the values. Keys are copied and transposed once per
head, so both products are of the same kind, and a small one in registers is all that they consist of.
"""

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from triptych.engine.vectors import (
    LANES,
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
    store,
    total,
)

_MOST_VECTORS = 4 if llvm.get_host_cpu_features().get("avx512f") else 1
"""Of a row of the product that is held in registers: a processor has 32 registers of one vector each, or 16 of half of one."""
_ROWS = 6
"""Of the product that is held in registers."""
_COLUMNS = LANES * _MOST_VECTORS
_TILE = 64
"""Keys whose part of a block's products is computed together, from the first cache."""
_MOST_BLOCK_ROWS = 48
_BLOCK_NBYTES = 512 << 10
"""Of a block's scores, which the second cache should hold."""
_FUSED = ("contract",)
"""Multiplications and additions may be one operation."""


def _small_product(  # noqa: PLR0913 - of three matrices
    context: Any,
    a: Any,
    a_at: Any,
    a_stride: Any,
    b: Any,
    b_at: Any,
    b_stride: Any,
    c: Any,
    c_at: Any,
    c_stride: Any,
    depth: Any,
    adds: Any,
    vectors: Any,
) -> Any:
    """C [6, vectors * lanes] = A [6, depth] times B [depth, vectors * lanes], plus what C was if ``adds``; ``vectors`` is a literal.

    The matrices are parts of flat arrays: where they begin, and the distance of two rows.
    """
    del context
    number = vectors.literal_value
    integer = types.int64
    signature = types.void(a, integer, integer, b, integer, integer, c, integer, integer, integer, types.boolean, vectors)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def pointer(at: int) -> Any:
            array = context.make_array(signature.args[at])(context, builder, value=arguments[at])
            return builder.gep(array.data, [arguments[at + 1]])

        vector = ir.VectorType(ir.FloatType(), LANES)
        (a, b, c), (a_stride, b_stride, c_stride) = map(pointer, (0, 3, 6)), (arguments[at] for at in (2, 5, 8))
        depth, adds = arguments[9], arguments[10]

        def load(row: Any, at: int) -> Any:
            place = builder.gep(row, [ir.Constant(ir.IntType(64), at * LANES)])
            return builder.load(builder.bitcast(place, vector.as_pointer()), align=4)

        def row(matrix: Any, stride: Any, number: Any) -> Any:
            return builder.gep(matrix, [builder.mul(stride, number)])

        rows = [row(c, c_stride, ir.Constant(ir.IntType(64), one)) for one in range(_ROWS)]
        zero = ir.Constant(vector, None)
        sums = []
        for one in rows:
            for at in range(number):
                sums.append(cgutils.alloca_once(builder, vector))
                builder.store(builder.select(adds, load(one, at), zero), sums[-1])
        a_rows = [row(a, a_stride, ir.Constant(ir.IntType(64), one)) for one in range(_ROWS)]
        with cgutils.for_range(builder, depth) as loop:
            b_row = row(b, b_stride, loop.index)
            parts = [load(b_row, at) for at in range(number)]
            for one in range(_ROWS):
                value = builder.load(builder.gep(a_rows[one], [loop.index]))
                single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
                every = builder.shuffle_vector(
                    single, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
                )
                for at in range(number):
                    held = sums[one * number + at]
                    product = builder.fmul(every, parts[at], flags=_FUSED)
                    builder.store(builder.fadd(builder.load(held), product, flags=_FUSED), held)
        for one in range(_ROWS):
            for at in range(number):
                place = builder.gep(rows[one], [ir.Constant(ir.IntType(64), at * LANES)])
                builder.store(builder.load(sums[one * number + at]), builder.bitcast(place, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, generate


small_product: Any = intrinsic(prefer_literal=True)(_small_product)


def _product_of(  # noqa: PLR0913
    a: Floats, a_stride: int, b: Floats, b_at: int, b_stride: int, c: Floats, c_at: int, c_stride: int,
    rows: int, columns: int, depth: int, a_at: int, adds: bool,
) -> None:
    """As ``_small_product``, of any multiples of 6 rows and of the lanes."""
    for row in range(0, rows, _ROWS):
        a_row, c_row = a_at + row * a_stride, c_at + row * c_stride
        column = 0
        while column + _COLUMNS <= columns:
            small_product(a, a_row, a_stride, b, b_at + column, b_stride, c, c_row + column, c_stride, depth, adds, _MOST_VECTORS)
            column += _COLUMNS
        while column + 2 * LANES <= columns:
            small_product(a, a_row, a_stride, b, b_at + column, b_stride, c, c_row + column, c_stride, depth, adds, 2)
            column += 2 * LANES
        while column < columns:
            small_product(a, a_row, a_stride, b, b_at + column, b_stride, c, c_row + column, c_stride, depth, adds, 1)
            column += LANES


_product = compiled(_product_of, any_order=False)


def _copy_keys_of(keys: Floats, kv_head: int, slots: Integers, transposed: Floats) -> None:
    """Keys [slots, kv heads, size] to ``transposed`` [tiles * size * tile]; zero behind the last."""
    size = keys.shape[2]
    for first in range(0, len(slots), _TILE):
        base = first * size
        count = min(_TILE, len(slots) - first)
        for at in range(count):
            slot = slots[first + at]
            for one in range(size):
                transposed[base + one * _TILE + at] = keys[slot, kv_head, one]
        for one in range(size):
            for at in range(count, -(-count // LANES) * LANES):
                transposed[base + one * _TILE + at] = np.float32(0.0)


_copy_keys = compiled(_copy_keys_of)


def _exponentials_of(scores: Floats, at: int, count: int) -> np.float32:
    """So many elements from ``at`` on, a multiple of the lanes, less the greatest of them, to their exponentials. Returns the sum."""
    most = each(np.float32(-np.inf))
    for one in range(at, at + count, LANES):
        most = greater(load(scores, one), most)
    subtracted, sums = each(greatest(most)), each(np.float32(0.0))
    for one in range(at, at + count, LANES):
        value = exponential(less(load(scores, one), subtracted))
        store(scores, one, value)
        sums = plus(sums, value)
    return total(sums)  # type: ignore[no-any-return]


_exponentials = compiled(_exponentials_of, any_order=False)


def _weigh_of(scores: Floats, at: int, begin: int, end: int, longest: int) -> np.float32:
    """Softmax without its division of a row from ``at`` on: what is before ``begin`` and from ``end`` on, up to ``longest``, counts nothing. Returns the sum."""
    first = begin // LANES * LANES
    last = -(-end // LANES) * LANES
    scores[at + first : at + begin] = -np.inf
    scores[at + end : at + last] = -np.inf
    found = _exponentials(scores, at + first, last - first)
    scores[at : at + begin] = np.float32(0.0)
    scores[at + end : at + longest] = np.float32(0.0)
    return found


_weigh = compiled(_weigh_of, any_order=False)


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
    """Attention of the last rows of a sequence, each up to itself: the first heads of ``query``, [rows, heads or more, size], to ``attended`` [rows, heads, size].

    ``slots``: of all positions that any row attends to. Of these a row attends to the last ``window`` up to itself if that is not 0. Units ``begin`` to ``end`` are computed, of
    (kv heads * blocks of rows).
    """
    kv_heads, size = keys.shape[1], keys.shape[2]
    rows, group = attended.shape[0], attended.shape[1] // kv_heads
    length = len(slots)
    first = length - rows
    padded = -(-size // LANES) * LANES
    columns = -(-length // _TILE) * _TILE
    per_block = rows_per_block(group, length)
    blocks = -(-rows // per_block)
    most = -(-per_block * group // _ROWS) * _ROWS
    transposed = np.empty(columns * size, np.float32)
    copied = np.empty(length * padded, np.float32)
    asked = np.empty(most * size, np.float32)
    scores = np.empty((most, columns), np.float32)
    flat = scores.reshape(-1)
    sums = np.empty(most * padded, np.float32)
    totals = np.empty(most, np.float32)
    copied_head = -1
    for unit in range(begin, end):
        kv_head = unit // blocks
        if kv_head != copied_head:
            copied_head = kv_head
            _copy_keys(keys, kv_head, slots, transposed)
            for at in range(length):
                for one in range(size):
                    copied[at * padded + one] = values[slots[at], kv_head, one]
                for one in range(size, padded):
                    copied[at * padded + one] = np.float32(0.0)
        row = unit % blocks * per_block
        count = min(per_block, rows - row)
        together = count * group
        full = -(-together // _ROWS) * _ROWS
        for at in range(together):
            asked[at * size : (at + 1) * size] = query[row + at // group, kv_head * group + at % group] * scaling
        for at in range(together * size, full * size):
            asked[at] = np.float32(0.0)
        oldest = max(0, first + row + 1 - window) if window else 0
        start = oldest // _TILE * _TILE
        seen = first + row + count
        for tile in range(start, seen, _TILE):
            width = min(_TILE, -(-(seen - tile) // LANES) * LANES)
            _product(asked, size, transposed, tile * size, _TILE, flat, tile, columns, full, width, size, 0, False)
        for at in range(together):
            own = first + row + at // group + 1
            before = max(0, own - window) - start if window else 0
            totals[at] = _weigh(flat, at * columns + start, before, own - start, seen - start)
        for tile in range(start, seen, _TILE):
            depth = min(_TILE, seen - tile)
            _product(flat, columns, copied, tile * padded, padded, sums, 0, padded, full, padded, depth, tile, tile > start)
        for at in range(together):
            share = np.float32(1.0) / totals[at]
            for one in range(size):
                attended[row + at // group, kv_head * group + at % group, one] = sums[at * padded + one] * share


def _rows_per_block_of(group: int, length: int) -> int:
    """Rows of a sequence that are computed together."""
    fits = _BLOCK_NBYTES // (4 * length) // _ROWS * _ROWS
    return max(1, min(_MOST_BLOCK_ROWS, fits) // group)


rows_per_block = compiled(_rows_per_block_of)
attend_prompt = compiled(_attend_prompt)
