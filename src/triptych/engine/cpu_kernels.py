"""Operations of the text engine, compiled for the processor: what lies between the matrix products of a decoder layer, and products of few
rows. float32, on a CPU, one thread for each call. Attention of prompts is in ``prompt_kernel``.

Numba compiles each function when it is called first, and keeps it in a cache directory. Arrays are contiguous, and of float32 unless
said otherwise; n is the number of rows of a pass. A row's results do not depend on the other rows. No index is checked.
"""

import math
from typing import Any

import numpy as np

from triptych.engine.vectors import (
    LANES,
    Booleans,
    Floats,
    Integers,
    compiled,
    divided,
    each,
    each_from,
    exponential,
    greater,
    greatest,
    less,
    load,
    load_first,
    multiply,
    multiply_add,
    plus,
    prefetch,
    store,
    store_first,
    store_sums,
    total,
)

_ZERO, _ONE, _NEVER = np.float32(0.0), np.float32(1.0), np.float32(-math.inf)
_TILE = 64
"""Positions whose scores attention computes before it reads their values: a multiple of lanes."""
_SEARCHED = 1024
"""Numbers of a row among which its greatest one is looked for, once it is known: a multiple of lanes."""
_AHEAD = 16
"""Positions between the one attention computes and the one it begins to read."""


def _inverse_rms_of(values: Floats, epsilon: np.float32) -> np.float32:
    squares = np.float32(0.0)
    for at in range(len(values)):
        squares += values[at] * values[at]
    return _ONE / np.float32(math.sqrt(squares / np.float32(len(values)) + epsilon))


_inverse_rms = compiled(_inverse_rms_of)


def _rms_norm(hidden: Floats, weight: Floats, epsilon: np.float32, normed: Floats) -> None:
    """Root mean square normalization: [n, width] to ``normed``."""
    rows, width = hidden.shape
    for row in range(rows):
        scale = _inverse_rms(hidden[row], epsilon)
        for at in range(width):
            normed[row, at] = hidden[row, at] * scale * weight[at]


rms_norm = compiled(_rms_norm)


def _add_rms_norm(hidden: Floats, added: Floats, weight: Floats, epsilon: np.float32, normed: Floats) -> None:
    """Add ``hidden`` to ``added``, which keeps the sum, and normalize it: [n, width] each."""
    rows, width = hidden.shape
    for row in range(rows):
        for at in range(width):
            added[row, at] += hidden[row, at]
        scale = _inverse_rms(added[row], epsilon)
        for at in range(width):
            normed[row, at] = added[row, at] * scale * weight[at]


add_rms_norm = compiled(_add_rms_norm)


def _gated(gate: Any, up: Any) -> Any:
    """SiLU(gate) * up."""
    return multiply(divided(gate, plus(each(_ONE), exponential(less(each(_ZERO), gate)))), up)


_gate = compiled(_gated, any_order=False)


def _silu_times(gate_and_up: Floats, product: Floats) -> None:
    """SiLU(gate) * up, of [n, 2 * width], to ``product`` [n, width]."""
    rows, width = product.shape
    given, flat_product = gate_and_up.reshape(-1), product.reshape(-1)
    whole, rest = width - width % LANES, width % LANES
    for row in range(rows):
        gate, up, to = row * 2 * width, (row * 2 + 1) * width, row * width
        for at in range(0, whole, LANES):
            store(flat_product, to + at, _gate(load(given, gate + at), load(given, up + at)))
        if rest:
            value = _gate(load_first(given, gate + whole, rest), load_first(given, up + whole, rest))
            store_first(flat_product, to + whole, value, rest)


silu_times = compiled(_silu_times)


def _rotate_heads(heads: Floats, cosines: Floats, sines: Floats, norm: Floats, epsilon: np.float32) -> None:
    """Rotate one row, [heads, size], in place: normalize each head if ``norm`` has weights, [size], and rotate it by
    position, [size].
    """
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


_rotate = compiled(_rotate_heads)


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
    """Rotate ``heads``, [n, heads + 2 * kv heads, size]: the queries and then the keys in place. Write keys and values
    to their slots, [slots, kv heads, size].

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


rotate_and_store = compiled(_rotate_and_store)


def _scores_of(
    asked: Floats,
    width: int,
    first_head: int,
    group: int,
    keys: Floats,
    values: Floats,
    places: Integers,
    within: int,
    size: int,
    begin: int,
    end: int,
    scores: Floats,
    stride: int,
) -> None:
    """Score ``group`` heads from ``first_head`` on, which share a key, before the positions from ``begin`` to ``end``.
    Scores go to ``scores``, ``stride`` for each head.

    Keys and values of the positions ahead, those of the next row as well, are on their way to the cache meanwhile: a
    processor does not guess where the next block lies.
    """
    rest = size % LANES
    whole = size - rest
    for head in range(group):
        store(scores, (head + 1) * stride - LANES, each(_NEVER))
    for at in range(begin, end, 4):  # four positions share each reading of the query
        for ahead in range(at + _AHEAD, min(at + _AHEAD + 4, len(places))):
            first = places[ahead] + within
            for column in range(first, first + size, LANES):
                prefetch(keys, column)
            for column in range(first, first + size, LANES):
                prefetch(values, column)
        p, q = places[at] + within, places[min(at + 1, end - 1)] + within  # behind the last one it is computed again
        r, s = places[min(at + 2, end - 1)] + within, places[min(at + 3, end - 1)] + within
        for head in range(group):
            a = b = c = d = each(_ZERO)
            for column in range(0, whole, LANES):
                query = load(asked, (first_head + head) * width + column)
                a = multiply_add(query, load(keys, p + column), a)
                b = multiply_add(query, load(keys, q + column), b)
                c = multiply_add(query, load(keys, r + column), c)
                d = multiply_add(query, load(keys, s + column), d)
            if rest:
                query = load(asked, (first_head + head) * width + whole)
                a = multiply_add(query, load_first(keys, p + whole, rest), a)
                b = multiply_add(query, load_first(keys, q + whole, rest), b)
                c = multiply_add(query, load_first(keys, r + whole, rest), c)
                d = multiply_add(query, load_first(keys, s + whole, rest), d)
            store_sums(scores, head * stride + at - begin, a, b, c, d)


_scores = compiled(_scores_of)


def _weights_of(
    scores: Floats, stride: int, count: int, first_head: int, group: int, most: Floats, sums: Floats, width: int
) -> None:
    """Turn the first ``count`` scores of each head into exp(score - ``most``), in place. ``most`` is the greatest so
    far: if it grows, what was summed before shrinks. Add them to the last lanes of the head's ``sums``.
    """
    for head in range(group):
        first = head * stride
        best = load(scores, first)
        for at in range(first + LANES, first + stride, LANES):
            best = greater(best, load(scores, at))
        before = most[first_head + head]
        now = max(before, greatest(best))
        if now != before:
            most[first_head + head], shrunk = now, exponential(each(before - now))
            for at in range((first_head + head) * width, (first_head + head + 1) * width, LANES):
                store(sums, at, multiply(load(sums, at), shrunk))
        last = (first_head + head + 1) * width - LANES
        total, subtracted = load(sums, last), each(now)
        for at in range(0, stride, LANES):
            weight = exponential(less(load(scores, first + at), subtracted))
            store(scores, first + at, weight)
            total = plus(total, weight if at + LANES <= count else load_first(scores, first + at, count - at))
        store(sums, last, total)


_weights = compiled(_weights_of)


def _add_values_of(
    weights: Floats,
    stride: int,
    first_head: int,
    group: int,
    values: Floats,
    places: Integers,
    within: int,
    size: int,
    begin: int,
    end: int,
    sums: Floats,
    width: int,
) -> None:
    """Values of the positions from ``begin`` to ``end``, times their weights, to the ``sums`` of the heads that share them."""
    rest = size % LANES
    whole = size - rest
    for head in range(group):
        to, weight = (first_head + head) * width, head * stride - begin
        at = 0
        while at + 4 * LANES <= whole:  # so much of a sum stays in registers
            a, b = load(sums, to + at), load(sums, to + at + LANES)
            c, d = load(sums, to + at + 2 * LANES), load(sums, to + at + 3 * LANES)
            for position in range(begin, end):
                place, times = places[position] + (within + at), each_from(weights, weight + position)
                a = multiply_add(times, load(values, place), a)
                b = multiply_add(times, load(values, place + LANES), b)
                c = multiply_add(times, load(values, place + 2 * LANES), c)
                d = multiply_add(times, load(values, place + 3 * LANES), d)
            store(sums, to + at, a)
            store(sums, to + at + LANES, b)
            store(sums, to + at + 2 * LANES, c)
            store(sums, to + at + 3 * LANES, d)
            at += 4 * LANES
        while at < size:
            a, count = load(sums, to + at), size - at
            for position in range(begin, end):
                value = load_first(values, places[position] + (within + at), count)
                a = multiply_add(each_from(weights, weight + position), value, a)
            store(sums, to + at, a)
            at += LANES


_add_values = compiled(_add_values_of)


def _places_of(
    tables: Integers, starts: Integers, lengths: Integers, block_tokens: int, window: int, slot_size: int
) -> Integers:
    """Places where the keys of all positions that rows attend to begin, those of a row after those of the one before."""
    number = 0
    for length in lengths:
        number += min(length, window) if window else length
    places = np.empty(number, np.int64)
    to = 0
    for row in range(len(lengths)):
        position = max(0, lengths[row] - window) if window else 0
        while position < lengths[row]:
            block, inside = position // block_tokens, position % block_tokens
            count = min(block_tokens - inside, lengths[row] - position)
            slot = tables[starts[row] + block] * block_tokens + inside
            for at in range(count):
                places[to + at] = (slot + at) * slot_size
            to += count
            position += count
    return places


_places = compiled(_places_of)


def _divide_by(sums: Floats, first: int, total: np.float32, attended: Floats, row: int, head: int) -> None:
    """Divide one head. Results are rounded alike wherever they lie: in any order, quotients might be approximated where
    a loop is vectorized.
    """
    for at in range(attended.shape[2]):
        attended[row, head, at] = sums[first + at] / total


_divide = compiled(_divide_by, any_order=False)


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
    attended: Floats,
) -> None:
    """Attention of the last positions of sequences: the first heads of ``query``, [rows, heads or more, size], to ``attended`` [rows, heads, size].

    ``tables``: blocks of all sequences, those of row i from ``starts[i]`` on. It attends to ``lengths[i]`` positions, of which the last
    ``window`` count if that is not 0.
    """
    heads, kv_heads, size = attended.shape[1], keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    places = _places(tables, starts, lengths, block_tokens, window, kv_heads * size)
    all_keys, all_values = keys.reshape(-1), values.reshape(-1)
    width = (size + LANES - 1) // LANES * LANES + LANES  # of a query or sum; the last lanes add up the weights
    asked, sums = np.zeros(heads * width, np.float32), np.empty(heads * width, np.float32)
    most, weights = np.empty(heads, np.float32), np.empty(group * _TILE, np.float32)
    end = 0
    for row in range(len(lengths)):
        begin, end = end, end + (min(lengths[row], window) if window else lengths[row])
        for head in range(heads):
            for at in range(size):
                asked[head * width + at] = query[row, head, at] * scaling
        for at in range(len(sums)):
            sums[at] = _ZERO
        for head in range(heads):
            most[head] = _NEVER
        for first in range(begin, end, _TILE):
            last = min(first + _TILE, end)
            stride = (last - first + LANES - 1) // LANES * LANES
            for kv_head in range(kv_heads):
                head, within = kv_head * group, kv_head * size
                _scores(
                    asked, width, head, group, all_keys, all_values, places, within, size, first, last, weights, stride
                )
                _weights(weights, stride, last - first, head, group, most, sums, width)
                _add_values(weights, stride, head, group, all_values, places, within, size, first, last, sums, width)
        for head in range(heads):
            total = _ZERO
            for at in range((head + 1) * width - LANES, (head + 1) * width):
                total += sums[at]
            _divide(sums, head * width, total, attended, row, head)


attend = compiled(_attend)


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
                weights = weight[output, at]
                a += rows[row, at] * weights
                b += rows[row + 1, at] * weights
                c += rows[row + 2, at] * weights
                d += rows[row + 3, at] * weights
                e += rows[row + 4, at] * weights
                f += rows[row + 5, at] * weights
                g += rows[row + 6, at] * weights
                h += rows[row + 7, at] * weights
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
                weights = weight[output, at]
                a += rows[row, at] * weights
                b += rows[row + 1, at] * weights
                c += rows[row + 2, at] * weights
                d += rows[row + 3, at] * weights
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


few_rows_product = compiled(_few_rows_product)


def _best_tokens(logits: Floats, tokens: Integers, are_finite: Booleans) -> None:
    """Find in each row of [n, vocabulary] the greatest number's place, the first of equal ones, and whether all numbers
    are finite: [n] each.
    """
    rows, vocabulary = logits.shape
    flat, whole = logits.reshape(-1), vocabulary - vocabulary % LANES
    for row in range(rows):
        first = row * vocabulary
        best, place, sums = _NEVER, 0, each(_ZERO)
        for begin in range(0, whole, _SEARCHED):
            most = each(_NEVER)
            for at in range(first + begin, first + min(begin + _SEARCHED, whole), LANES):
                value = load(flat, at)
                most, sums = greater(value, most), plus(sums, value)
            greatest_here = greatest(most)
            if greatest_here > best:
                best, place = greatest_here, begin
        added = total(sums)  # it is finite only if all are
        for at in range(whole, vocabulary):
            added += flat[first + at]
            if flat[first + at] > best:
                best, place = flat[first + at], at
        while place < vocabulary - 1 and flat[first + place] != best:
            place += 1
        tokens[row], are_finite[row] = place, np.isfinite(added)


best_tokens = compiled(_best_tokens)


def prepare() -> None:
    """Compile all, or load what is in the cache. Raises OSError if the cache cannot be written any more."""
    ones_row, epsilon = np.ones((1, 2), np.float32), np.float32(1e-6)
    heads, none, first = ones_row.reshape(1, 1, 2), np.empty(0, np.float32), np.zeros(1, np.int64)
    rms_norm(ones_row, ones_row[0], epsilon, ones_row.copy())
    add_rms_norm(ones_row, ones_row.copy(), ones_row[0], epsilon, ones_row.copy())
    silu_times(ones_row, np.empty((1, 1), np.float32))
    rotate_and_store(heads.repeat(3, 1), ones_row, ones_row, none, none, epsilon, first, heads.copy(), heads.copy())
    attend(heads, heads, heads, first, first, first + 1, 1, 0, epsilon, heads.copy())
    few_rows_product(ones_row, ones_row, none, 0, 1, ones_row.copy(), 0)
    best_tokens(ones_row, first.copy(), np.empty(1, np.bool_))
