from math import inf
from random import Random

import pytest

from triptych.machine.router.encode_times import ENOUGH, EncodeTimes, Tail


def test_a_percentile_is_not_known_before_there_are_enough_times() -> None:
    tail = Tail()
    for _ in range(ENOUGH - 1):
        tail.observe(1.0)
    assert tail.value_s == inf
    tail.observe(1.0)
    assert 1.0 <= tail.value_s <= 1.1


@pytest.mark.parametrize("scale_s", [0.0007, 0.05, 3.0, 200.0])
def test_the_percentile_is_that_of_the_times_from_above_and_within_a_bucket(scale_s: float) -> None:
    tail, rng = Tail(), Random(5)
    times = [scale_s * rng.random() for _ in range(960)]
    for time_s in times:
        tail.observe(time_s)
    exact = sorted(times)[round(0.99 * len(times))]
    assert exact <= tail.value_s <= 1.12 * exact


@pytest.mark.parametrize(("time_s", "least_s", "most_s"), [(0.0, 1e-4, 1.1e-4), (1e9, 1600.0, 1800.0)])
def test_times_out_of_range_are_counted_at_its_ends(time_s: float, least_s: float, most_s: float) -> None:
    tail = Tail()
    for _ in range(ENOUGH):
        tail.observe(time_s)
    assert least_s <= tail.value_s <= most_s


def test_old_times_fade() -> None:
    tail = Tail()
    for _ in range(2000):
        tail.observe(10.0)
    for _ in range(6000):
        tail.observe(0.1)
    assert tail.value_s < 0.12


def test_each_size_has_its_own_percentile() -> None:
    times = EncodeTimes()
    for _ in range(ENOUGH):
        times.encoded("a", 1000, 1000, 2.0)
        times.took_at_least(100, 0.5)
    assert 2.0 <= times.tail_s(600) <= 2.2
    assert 0.5 <= times.tail_s(127) <= 0.55
    assert times.tail_s(50) == inf
    times.restart_tails()
    assert times.tail_s(1000) == inf


def pool(times: EncodeTimes, slow: float, *, rounds: int = 40, names: str = "abcd") -> None:
    """The first encoder takes ``slow`` times as long as the others, for any amount of pending tokens."""
    rng = Random(3)
    for _ in range(rounds):
        for name in names:
            pending = rng.choice((100, 1000, 10_000))
            times.encoded(
                name, 100, pending, pending / 10_000 * (slow if name == names[0] else 1.0) * rng.uniform(0.7, 1.3)
            )


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_an_encoder_is_slow_beside_the_others_however_much_it_was_given(names: str) -> None:
    times = EncodeTimes()
    pool(times, 10.0, names=names)
    assert times.is_slow("a", names[1:], 5.0)
    assert not times.is_slow("a", names[1:], 20.0)
    assert not times.is_slow("b", "a" + names[2:], 5.0)
    times.forget("a")
    assert not times.is_slow("a", names[1:], 5.0)


def test_equal_encoders_are_not_slow_whatever_they_were_given() -> None:
    times, rng = EncodeTimes(), Random(4)
    for _ in range(100):
        for name, pending in (("a", 10_000), ("b", 100)):
            times.encoded(name, 100, pending, pending / 10_000 * rng.uniform(0.5, 1.5))
    assert not times.is_slow("a", "b", 1.5)


def test_one_item_that_takes_long_makes_no_encoder_slow() -> None:
    times = EncodeTimes()
    pool(times, 1.0)
    times.encoded("a", 100, 1000, 100.0)
    assert not times.is_slow("a", "bcd", 5.0)


def test_nothing_is_slow_without_comparison() -> None:
    times = EncodeTimes()
    pool(times, 10.0, names="a")
    assert not times.is_slow("a", "", 5.0)
    assert not times.is_slow("a", "b", 5.0)
    assert not times.is_slow("new", "a", 5.0)
    assert EncodeTimes().relative(100, 1.0) is None


def test_a_single_time_is_compared_with_the_others() -> None:
    times = EncodeTimes()
    pool(times, 1.0)
    relative = times.relative(1000, 1.0)
    assert relative is not None
    assert relative == pytest.approx(10.0, rel=0.3)
    assert times.was_slow(relative, "bcd", 5.0)
    assert not times.was_slow(relative, "bcd", 15.0)
