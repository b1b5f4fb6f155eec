"""Vectors of compiled kernels, against numpy."""

import math
from typing import Any

import numba
import numpy as np
import pytest

from triptych.engine import vectors as v

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


def of(*values: float) -> Floats:
    return np.array(values, np.float32)


def _exponentials(given: Floats, found: Floats) -> None:
    for at in range(0, len(given), v.LANES):
        v.store(found, at, v.exponential(v.load(given, at)))


def _all(left: Floats, right: Floats, found: Floats) -> None:
    a, b = v.load(left, 0), v.load(right, 0)
    v.store(found, 0, v.greater(a, b))
    v.store(found, 16, v.less(a, b))
    v.store(found, 32, v.divided(a, b))
    v.store(found, 48, v.plus(a, b))
    v.store(found, 64, v.multiply(a, b))
    v.store(found, 80, v.multiply_add(a, b, v.each_from(right, 3)))
    v.store(found, 96, v.each(v.greatest(a)))
    v.store(found, 112, v.each(v.total(a)))
    v.prefetch(left, 1 << 20)


def _first(given: Floats, count: int, found: Floats) -> None:
    v.store(found, 0, v.load_first(given, 1, count))
    v.store_first(found, 17, v.load_first(given, 1, count), count)


def _sums(given: Floats, found: Floats) -> None:
    v.store_sums(found, 1, v.load(given, 0), v.load(given, 16), v.load(given, 32), v.load(given, 48))


exponentials, every, first, sums = (
    v.compiled(_exponentials),
    v.compiled(_all),
    v.compiled(_first),
    v.compiled(_sums),
)


def test_exponentials_are_exact_to_the_last_bits() -> None:
    given = np.linspace(-87.0, 88.0, 16 * 4000, dtype=np.float32)
    found = np.empty_like(given)
    exponentials(given, found)
    np.testing.assert_allclose(found, np.exp(given.astype(np.float64)), rtol=2e-7)


def test_exponentials_of_what_is_beyond() -> None:
    given = np.tile(of(0.0, -0.0, -90.0, -math.inf, 89.0, 1000.0, math.inf, math.nan), 2)
    found = np.empty_like(given)
    exponentials(given, found)
    assert found[:2].tolist() == [1.0, 1.0]
    assert (found[2:4] < 2e-38).all()
    assert (found[4:7] > 1e38).all()
    assert np.isnan(found[7])


def test_arithmetic() -> None:
    rng = np.random.default_rng(0)
    left, right, found = (rng.standard_normal(size, np.float32) for size in (16, 16, 128))
    every(left, right, found)
    expected = [
        np.maximum(left, right),
        left - right,
        left / right,
        left + right,
        left * right,
        left * right + right[3],
        np.full(16, left.max()),
        np.full(16, left.sum()),
    ]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 8, 15, 16])
def test_only_the_first_lanes_are_read_and_written(count: int) -> None:
    """Memory that is not the caller's begins behind them."""
    given, found = np.arange(count + 1, dtype=np.float32), np.full(40, -1.0, np.float32)
    first(given, count, found)
    assert found[:16].tolist() == [*range(1, count + 1), *[0.0] * (16 - count)]
    assert found[17 : 17 + count].tolist() == [*range(1, count + 1)]
    assert (found[17 + count :] == -1.0).all()


def test_sums_of_four() -> None:
    given, found = np.arange(64, dtype=np.float32), np.full(6, -1.0, np.float32)
    sums(given, found)
    assert found.tolist() == [-1.0, *given.reshape(4, 16).sum(1).tolist(), -1.0]


def test_without_a_directory_for_its_cache_a_function_is_compiled_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    njit: Any = numba.njit

    def refusing(*, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(numba, "njit", refusing)
    found = of(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    v.compiled(_sums)(np.ones(64, np.float32), found)
    assert found.tolist() == [0.0, 16.0, 16.0, 16.0, 16.0, 0.0]
