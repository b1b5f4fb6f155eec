"""Attention of many rows on a CPU, in float32: two matrix products by oneDNN, and a softmax between them.

Torch's attention computes its products by MKL, which leaves AVX-512 unused on processors that are not Intel's. Which is faster depends on the
processor, so both are measured at start.
"""

import time
from functools import lru_cache
from math import inf

import torch
from torch.nn.functional import scaled_dot_product_attention

from triptych.engine.linear_products import has_onednn, onednn_linear

_LEAST_ROWS = 16
"""Numbers of rows and positions are multiples of it."""
_CAUSAL_ROWS = 128
"""Most rows of a head that are computed together where no row attends to positions after itself: nothing after the last is computed."""
_TILE_NBYTES = 4 << 20
"""Most bytes of scores of rows that are computed together, if there are more than the fewest."""
_LEAST_MULTIPLICATIONS = 1 << 21
"""Multiplications of one product, for heads that share a key, below which the calls cost more than they save."""
_MEASURED_LENGTH, _SAMPLES = 512, 5
_WORTHWHILE = 0.9
"""Share of the time of torch's attention below which this is used."""


def product_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention of query [kv heads, group, n, size] to keys and values [kv heads, length, size]: [kv heads, group, n,
    size].

    ``mask`` [n, length] is added to the scores. With ``is_causal``, and no mask, the rows are the last n positions.
    """
    kv_heads, group, count, size = query.shape
    length = keys.shape[1]
    first = length - count
    padded_keys, padded_values = (_padded(tensor) for tensor in (keys, values))
    rows = _padded(query * scaling)
    out = torch.empty_like(rows)
    tile = _TILE_NBYTES // (query.element_size() * group * padded_keys.shape[1])
    tile = max(1, tile // _LEAST_ROWS) * _LEAST_ROWS
    tile = min(tile, _CAUSAL_ROWS) if is_causal else tile
    for begin in range(0, rows.shape[2], tile):
        end = min(begin + tile, rows.shape[2])
        seen = min(first + end, length) if is_causal else length
        columns = _rounded(seen)
        for head in range(kv_heads):
            together = rows[head, :, begin:end].reshape(-1, size)
            scores = onednn_linear(together, padded_keys[head, :columns])
            by_row = scores.view(group, end - begin, columns)
            if is_causal:
                first_own = first + begin
                by_row[:, :, first_own:] += _triangle(end - begin, columns - first_own)
            else:
                if mask is not None:
                    some = mask[begin:end]
                    by_row[:, : len(some), :length] += some
                by_row[:, :, length:] = -inf
            weights = torch.softmax(scores, -1)
            out[head, :, begin:end] = onednn_linear(weights, padded_values[head, :columns].t()).view(group, -1, size)
    return out[:, :, :count]


def _rounded(number: int) -> int:
    """Up, to a multiple of 16, or of a power of two that is a 32nd to a 16th of it: oneDNN makes, and keeps, a kernel for each shape."""
    multiple = max(_LEAST_ROWS, (1 << number.bit_length()) >> 5)
    return -(-number // multiple) * multiple


def _padded(states: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, with zeros behind the last but one dimension."""
    count = states.shape[-2]
    padded = states.new_empty(*states.shape[:-2], _rounded(count), states.shape[-1])
    padded[..., :count, :] = states
    padded[..., count:, :] = 0.0
    return padded


@lru_cache(maxsize=256)
def _triangle(rows: int, columns: int) -> torch.Tensor:
    """Added to scores: row i sees the columns 0 to i."""
    return torch.full((rows, columns), -inf).triu_(1)


def is_worth_it(group: int, count: int, length: int, size: int) -> bool:
    """Whether ``count`` rows of ``group`` heads that share a key, before so many positions, are enough."""
    return group * count * length * size >= _LEAST_MULTIPLICATIONS


@torch.inference_mode()
def is_faster(kv_heads: int, group: int, size: int, *, rows: int = 128, is_causal: bool = True) -> bool:
    """Whether it is faster than torch's attention for so many rows on this processor, which is measured."""
    if not has_onednn() or not is_worth_it(group, rows, _MEASURED_LENGTH, size):
        return False
    query = torch.full((kv_heads, group, rows, size), 0.5)
    keys = torch.full((kv_heads, _MEASURED_LENGTH, size), 0.5)
    mask = torch.zeros(rows, _MEASURED_LENGTH) if is_causal else None

    def by_torch() -> None:
        shared = keys[:, None].expand(-1, group, -1, -1)
        scaled_dot_product_attention(query, shared, shared, attn_mask=mask, scale=1.0)

    def by_products() -> None:
        product_attention(query, keys, keys, scaling=1.0, is_causal=is_causal)

    times_s: dict[object, float] = {}
    for _ in range(_SAMPLES):
        for attend in (by_torch, by_products):
            began_s = time.thread_time()  # others may have the processor meanwhile
            attend()
            times_s[attend] = min(times_s.get(attend, inf), time.thread_time() - began_s)
    return times_s[by_products] < _WORTHWHILE * times_s[by_torch]
