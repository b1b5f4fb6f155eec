import random

import pytest

from triptych.workload.interval import Interval, quantile_of_t


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert quantile_of_t(0.95, freedom) == pytest.approx(quantile, abs=1e-4)


def test_intervals_have_the_mean_as_often_as_they_say() -> None:
    rng, inside = random.Random(0), 0
    for _ in range(2000):
        interval = Interval.of([rng.gauss(3.0, 2.0) for _ in range(5)])
        assert interval.ends is not None
        inside += interval.ends[0] <= 3.0 <= interval.ends[1]
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


def test_one_value_has_no_interval_and_equal_ones_have_none_to_speak_of() -> None:
    assert Interval.of([4.0]).ends is None
    assert Interval.of([4.0, 4.0, 4.0]).ends == (4.0, 4.0)
