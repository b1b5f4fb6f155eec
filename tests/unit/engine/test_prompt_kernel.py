"""Attention of prompts, against the same in float64."""

import math

import numpy as np
import pytest

from triptych.engine.prompt_kernel import attend_prompt, rows_per_block

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def made(rng: np.random.Generator, rows: int, group: int, kv_heads: int, size: int, length: int) -> list[Floats]:
    """The heads of ``rows`` positions, queries first, and keys and values of more slots than there are positions."""
    shapes = (rows, (group + 2) * kv_heads, size), (length + 9, kv_heads, size), (length + 9, kv_heads, size)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def units(rows: int, group: int, kv_heads: int, length: int) -> int:
    return kv_heads * -(-rows // rows_per_block(group, length))


def attend(
    heads: Floats, keys: Floats, values: Floats, slots: np.ndarray[tuple[int], np.dtype[np.int64]], window: int = 0
) -> Floats:
    rows, kv_heads, size = len(heads), *keys.shape[1:]
    query_heads = heads.shape[1] - 2 * kv_heads
    attended = np.full((rows, query_heads, size), math.nan, np.float32)
    end = units(rows, query_heads // kv_heads, kv_heads, len(slots))
    attend_prompt(heads, keys, values, slots, window, np.float32(size**-0.5), 0, end, attended)
    return attended


def expected(
    heads: Floats, keys: Floats, values: Floats, slots: np.ndarray[tuple[int], np.dtype[np.int64]], window: int = 0
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    rows, kv_heads, size = len(heads), *keys.shape[1:]
    query_heads = heads.shape[1] - 2 * kv_heads
    found = np.empty((rows, query_heads, size))
    for row in range(rows):
        end = len(slots) - rows + row + 1
        seen = slots[max(0, end - window) if window else 0 : end]
        for head in range(query_heads):
            kv_head = head // (query_heads // kv_heads)
            scores = keys[seen, kv_head].astype(np.float64) @ heads[row, head] * size**-0.5
            weights = np.exp(scores - scores.max())
            found[row, head] = weights @ values[seen, kv_head] / weights.sum()
    return found


@pytest.mark.parametrize("window", [0, 1, 5, 70])
@pytest.mark.parametrize(
    ("group", "kv_heads", "size"), [(1, 2, 8), (3, 1, 20), (4, 2, 64), (7, 2, 33), (8, 1, 80), (2, 1, 128), (50, 1, 16)]
)
def test_rows_attend_up_to_themselves(
    group: int, kv_heads: int, size: int, window: int, rng: np.random.Generator
) -> None:
    for rows, length in ((1, 1), (1, 65), (5, 5), (16, 64), (17, 150), (63, 300), (130, 130)):
        heads, keys, values = made(rng, rows, group, kv_heads, size, length)
        slots = rng.permutation(len(keys))[:length]
        found = attend(heads, keys, values, slots, window)
        np.testing.assert_allclose(found, expected(heads, keys, values, slots, window), rtol=0.0, atol=2e-6)


def test_a_row_is_the_same_whatever_is_beside_it(rng: np.random.Generator) -> None:
    """Chunks of a prompt may end anywhere, and its blocks lie anywhere."""
    heads, keys, values = made(rng, 100, 3, 2, 48, 200)
    slots = rng.permutation(len(keys))[:200]
    whole = attend(heads, keys, values, slots)
    for begin, end in ((0, 1), (0, 37), (37, 99), (99, 100)):
        part = attend(heads[begin:end].copy(), keys, values, slots[: 100 + end])
        np.testing.assert_array_equal(part, whole[begin:end])
    np.testing.assert_array_equal(attend(heads, keys[slots], values[slots], np.arange(200)), whole)


def test_units_can_be_computed_apart(rng: np.random.Generator) -> None:
    """As threads do: each writes its own rows and heads alone."""
    heads, keys, values = made(rng, 60, 4, 3, 24, 90)
    slots = np.arange(90)
    whole, apart = attend(heads, keys, values, slots), np.full((60, 12, 24), math.nan, np.float32)
    ends = [0, 1, 6, 7, units(60, 4, 3, 90)]
    for begin, end in zip(ends[::-1][1:], ends[::-1][:-1], strict=True):
        attend_prompt(heads, keys, values, slots, 0, np.float32(24**-0.5), begin, end, apart)
    np.testing.assert_array_equal(apart, whole)


def test_scores_may_be_large(rng: np.random.Generator) -> None:
    heads, keys, values = made(rng, 20, 2, 1, 16, 40)
    heads *= 200
    slots = np.arange(40)
    np.testing.assert_allclose(attend(heads, keys, values, slots), expected(heads, keys, values, slots), atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(bad: float, rng: np.random.Generator) -> None:
    """The engine ends the sequence: of its own rows, those that see it are not finite, whichever has it."""
    heads, keys, values = made(rng, 9, 2, 1, 16, 20)
    slots = np.arange(20)
    heads[4, 0, 3] = bad
    assert not np.isfinite(attend(heads, keys, values, slots)[4, 0]).any()
    heads[4, 0, 3] = 0.0
    values[15, 0, 2] = bad
    assert not np.isfinite(attend(heads, keys, values, slots)[8, :, 2]).any()


def test_a_block_of_a_long_sequence_has_fewer_rows() -> None:
    """The block's scores fit into the second cache; a row whose heads do not is computed alone."""
    assert [rows_per_block(4, length) for length in (100, 4_000, 100_000)] == [12, 7, 1]
    assert rows_per_block(64, 100) == 1
