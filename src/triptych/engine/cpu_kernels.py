"""Operations of the text engine, compiled for the processor: what lies between the matrix products of a decoder layer, and products of few
rows. float32, on a CPU, one thread for each call.

Numba compiles each function when it is called first, and keeps it in a cache directory. Arrays are contiguous, and of float32 unless
said otherwise; n is the number of rows of a pass. A row's results do not depend on the other rows. No index is checked.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])
Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

_ANY_ORDER = {"reassoc", "contract", "nsz", "arcp"}
"""Sums are vectorized. Infinities and NaN stay what they are: the engine looks for them."""
_LOG2_E, _LN_2_HIGH, _LN_2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87.3), np.float32(88.0)
_HALF, _ONE = np.float32(0.5), np.float32(1.0)
_SERIES = tuple(
    np.float32(one)
    for one in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
"""Of Cephes' ``expf``."""


def _compiled(function: F, *, any_order: bool = True) -> F:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": _ANY_ORDER if any_order else False}
    try:
        made: F = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no directory for its cache can be written
        made = numba.njit(**options)(function)
    return made


def _reinterpret(context: Any, bits: Any) -> Any:
    """An int32 as the float32 with these bits."""
    del context, bits

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.types.float32(numba.types.int32), generate


_as_float: Any = intrinsic(_reinterpret)


def _exp_plain(x: np.float32) -> np.float32:
    """To 2e-7 of its value, and vectorized in a loop, as libm's is not. NaN stays NaN."""
    bounded = min(max(x, _LEAST), _MOST)
    power = np.floor(bounded * _LOG2_E + _HALF)
    rest = bounded - power * _LN_2_HIGH
    rest = rest - power * _LN_2_LOW
    value = _SERIES[0]
    value = value * rest + _SERIES[1]
    value = value * rest + _SERIES[2]
    value = value * rest + _SERIES[3]
    value = value * rest + _SERIES[4]
    value = value * rest + _SERIES[5]
    value = value * rest * rest + rest + _ONE
    scaled = value * _as_float((np.int32(power) + np.int32(127)) << np.int32(23))
    return scaled if x == x else x  # noqa: PLR0124 - false for NaN alone


_exp = _compiled(_exp_plain, any_order=False)


def _inverse_rms_of(values: Floats, epsilon: np.float32) -> np.float32:
    squares = np.float32(0.0)
    for at in range(len(values)):
        squares += values[at] * values[at]
    return _ONE / np.float32(math.sqrt(squares / np.float32(len(values)) + epsilon))


_inverse_rms = _compiled(_inverse_rms_of)


def _rms_norm(hidden: Floats, weight: Floats, epsilon: np.float32, normed: Floats) -> None:
    """Root mean square normalization: [n, width] to ``normed``."""
    rows, width = hidden.shape
    for row in range(rows):
        scale = _inverse_rms(hidden[row], epsilon)
        for at in range(width):
            normed[row, at] = hidden[row, at] * scale * weight[at]


rms_norm = _compiled(_rms_norm)


def _add_rms_norm(hidden: Floats, added: Floats, weight: Floats, epsilon: np.float32, normed: Floats) -> None:
    """Add ``hidden`` to ``added``, which keeps the sum, and normalize it: [n, width] each."""
    rows, width = hidden.shape
    for row in range(rows):
        for at in range(width):
            added[row, at] += hidden[row, at]
        scale = _inverse_rms(added[row], epsilon)
        for at in range(width):
            normed[row, at] = added[row, at] * scale * weight[at]


add_rms_norm = _compiled(_add_rms_norm)


def _silu_times(gate_and_up: Floats, product: Floats) -> None:
    """SiLU(gate) * up, of [n, 2 * width], to ``product`` [n, width]."""
    rows, width = product.shape
    for row in range(rows):
        for at in range(width):
            value = gate_and_up[row, at]
            product[row, at] = value / (_ONE + _exp(-value)) * gate_and_up[row, width + at]


silu_times = _compiled(_silu_times)


def _rotate_heads(heads: Floats, cosines: Floats, sines: Floats, norm: Floats, epsilon: np.float32) -> None:
    """Of one row, [heads, size] in place: normalize each head if ``norm`` has weights, [size], and rotate it by position, [size]."""
    number, size = heads.shape
    half = size // 2
    for head in range(number):
        if len(norm):
            scale = _inverse_rms(heads[head], epsilon)
            for at in range(size):
                heads[head, at] = heads[head, at] * scale * norm[at]
        for at in range(half):
            first, second = heads[head, at], heads[head, at + half]
            heads[head, at] = first * cosines[at] - second * sines[at]
            heads[head, at + half] = second * cosines[at + half] + first * sines[at + half]


_rotate = _compiled(_rotate_heads)


def _rotate_and_store(
    heads: Floats,
    cosines: Floats,
    sines: Floats,
    query_norm: Floats,
    key_norm: Floats,
    epsilon: np.float32,
    slots: Integers,
    keys: Floats,
    values: Floats,
) -> None:
    """Of ``heads``, [n, heads + 2 * kv heads, size], rotate the queries and then the keys in place, and write keys and values to their slots,
    [slots, kv heads, size].

    ``query_norm`` and ``key_norm`` are empty where heads are not normalized.
    """
    kv_heads, size = keys.shape[1], keys.shape[2]
    first_value = heads.shape[1] - kv_heads
    first_key = first_value - kv_heads
    for row in range(len(slots)):
        _rotate(heads[row, :first_key], cosines[row], sines[row], query_norm, epsilon)
        _rotate(heads[row, first_key:first_value], cosines[row], sines[row], key_norm, epsilon)
        slot = slots[row]
        for head in range(kv_heads):
            for at in range(size):
                keys[slot, head, at] = heads[row, first_key + head, at]
                values[slot, head, at] = heads[row, first_value + head, at]


rotate_and_store = _compiled(_rotate_and_store)


def _softmax_of(scores: Floats) -> None:
    most = scores[0]
    for at in range(len(scores)):
        most = max(most, scores[at])
    total = np.float32(0.0)
    for at in range(len(scores)):
        scores[at] = _exp(scores[at] - most)
        total += scores[at]
    for at in range(len(scores)):
        scores[at] /= total


_softmax = _compiled(_softmax_of)


def _scores_of(
    query: Floats,
    row: int,
    first: int,
    keys: Floats,
    kv_head: int,
    slots: Integers,
    scaling: np.float32,
    scores: Floats,
) -> None:
    """Of the heads of a row that share a key, from ``first`` on, before the keys at ``slots``: to ``scores`` [heads, longest]."""
    size = query.shape[2]
    fours = len(slots) - len(slots) % 4  # so many positions at a time share each reading of the query
    for at in range(0, fours, 4):
        p, q, r, s = slots[at], slots[at + 1], slots[at + 2], slots[at + 3]
        for head in range(len(scores)):
            a = b = c = d = np.float32(0.0)
            for one in range(size):
                asked = query[row, first + head, one]
                a += asked * keys[p, kv_head, one]
                b += asked * keys[q, kv_head, one]
                c += asked * keys[r, kv_head, one]
                d += asked * keys[s, kv_head, one]
            scores[head, at] = a * scaling
            scores[head, at + 1] = b * scaling
            scores[head, at + 2] = c * scaling
            scores[head, at + 3] = d * scaling
    for at in range(fours, len(slots)):
        for head in range(len(scores)):
            a = np.float32(0.0)
            for one in range(size):
                a += query[row, first + head, one] * keys[slots[at], kv_head, one]
            scores[head, at] = a * scaling


_scores = _compiled(_scores_of)


def _sum_of(weights: Floats, values: Floats, kv_head: int, slots: Integers, total: Floats) -> None:
    """The values at ``slots``, times their weights, to ``total`` [size]."""
    fours = len(slots) - len(slots) % 4  # so many positions at a time share each writing of the sum
    total[:] = np.float32(0.0)
    for at in range(0, fours, 4):
        p, q, r, s = slots[at], slots[at + 1], slots[at + 2], slots[at + 3]
        a, b, c, d = weights[at], weights[at + 1], weights[at + 2], weights[at + 3]
        for one in range(len(total)):
            total[one] += (
                a * values[p, kv_head, one]
                + b * values[q, kv_head, one]
                + c * values[r, kv_head, one]
                + d * values[s, kv_head, one]
            )
    for at in range(fours, len(slots)):
        for one in range(len(total)):
            total[one] += weights[at] * values[slots[at], kv_head, one]


_sum = _compiled(_sum_of)


def _attend(
    query: Floats,
    keys: Floats,
    values: Floats,
    tables: Integers,
    starts: Integers,
    lengths: Integers,
    block_tokens: int,
    window: int,
    scaling: np.float32,
    scores: Floats,
    attended: Floats,
) -> None:
    """Attention of the last positions of sequences: the first heads of ``query``, [rows, heads or more, size], to ``attended`` [rows, heads, size].

    ``tables``: blocks of all sequences, those of row i from ``starts[i]`` on. It attends to ``lengths[i]`` positions, of which the last
    ``window`` count if that is not 0. ``scores`` [heads per kv head, longest] is scratch memory.
    """
    kv_heads = keys.shape[1]
    group = attended.shape[1] // kv_heads
    slots = np.empty(scores.shape[1], np.int64)
    for row in range(len(query)):
        length = lengths[row]
        oldest = max(0, length - window) if window else 0
        seen = length - oldest
        block, inside = starts[row] + oldest // block_tokens, oldest % block_tokens
        for at in range(seen):
            slots[at] = tables[block] * block_tokens + inside
            inside += 1
            if inside == block_tokens:
                block, inside = block + 1, 0
        for kv_head in range(kv_heads):
            first = kv_head * group
            _scores(query, row, first, keys, kv_head, slots[:seen], scaling, scores)
            for head in range(group):
                _softmax(scores[head, :seen])
                _sum(scores[head], values, kv_head, slots[:seen], attended[row, first + head])


attend = _compiled(_attend)


def _few_rows_product(
    rows: Floats, weight: Floats, bias: Floats, begin: int, end: int, product: Floats, first: int
) -> None:
    """Outputs ``begin`` to ``end`` of a linear layer: rows [n, inputs] and weight [outputs, inputs] to ``product`` [n, ``first`` + outputs or more], where
    they begin at ``first``.

    ``bias`` is empty where there is none. Eight rows at a time share each reading of the weights.
    """
    number, inputs = rows.shape
    zero = np.float32(0.0)
    for output in range(begin, end):
        added = bias[output] if len(bias) else zero
        to = first + output
        row = 0
        while row + 8 <= number:
            a = b = c = d = e = f = g = h = added
            for at in range(inputs):
                one = weight[output, at]
                a += rows[row, at] * one
                b += rows[row + 1, at] * one
                c += rows[row + 2, at] * one
                d += rows[row + 3, at] * one
                e += rows[row + 4, at] * one
                f += rows[row + 5, at] * one
                g += rows[row + 6, at] * one
                h += rows[row + 7, at] * one
            product[row, to] = a
            product[row + 1, to] = b
            product[row + 2, to] = c
            product[row + 3, to] = d
            product[row + 4, to] = e
            product[row + 5, to] = f
            product[row + 6, to] = g
            product[row + 7, to] = h
            row += 8
        while row + 4 <= number:
            a = b = c = d = added
            for at in range(inputs):
                one = weight[output, at]
                a += rows[row, at] * one
                b += rows[row + 1, at] * one
                c += rows[row + 2, at] * one
                d += rows[row + 3, at] * one
            product[row, to] = a
            product[row + 1, to] = b
            product[row + 2, to] = c
            product[row + 3, to] = d
            row += 4
        while row < number:
            a = added
            for at in range(inputs):
                a += rows[row, at] * weight[output, at]
            product[row, to] = a
            row += 1


few_rows_product = _compiled(_few_rows_product)


def prepare() -> None:
    """Compile all, or load what is in the cache. Raises OSError if the cache cannot be written any more."""
    one, epsilon = np.ones((1, 2), np.float32), np.float32(1e-6)
    heads, none, first = one.reshape(1, 1, 2), np.empty(0, np.float32), np.zeros(1, np.int64)
    rms_norm(one, one[0], epsilon, one.copy())
    add_rms_norm(one, one.copy(), one[0], epsilon, one.copy())
    silu_times(one, np.empty((1, 1), np.float32))
    rotate_and_store(heads.repeat(3, 1), one, one, none, none, epsilon, first, heads.copy(), heads.copy())
    attend(heads, heads, heads, first, first, first + 1, 1, 0, epsilon, one.copy(), heads.copy())
    few_rows_product(one, one, none, 0, 1, one.copy(), 0)
