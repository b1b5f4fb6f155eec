"""After what time a request that a limit refuses is told to come again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.machine.turnover import LEAST_S, LONGEST_S, Turnover


def used(per_s: float, *, amount: int = 1, until_s: float = 20.0) -> Turnover:
    turnover = Turnover()
    for number in range(int(until_s * per_s) + 1):
        turnover.free(amount, number / per_s)
    return turnover


def test_without_experience_it_is_the_least() -> None:
    turnover = Turnover()
    assert turnover.refuse("a", 0.0) == LEAST_S
    turnover.free(0, 0.0)
    assert turnover.refuse("a", 0.0) == LEAST_S
    turnover.free(1, 1.0)
    assert turnover.refuse("a", 100.0) == LEAST_S, "what is long ago tells nothing"
    turnover.free(1000, 101.0)
    assert turnover.after_s(50_000, 200.0) == LEAST_S


@pytest.mark.parametrize("per_s", [0.5, 4.0, 100.0])
def test_those_that_are_refused_get_the_places_that_become_free_one_after_the_other(per_s: float) -> None:
    turnover = used(per_s)
    told = [turnover.refuse("a", 20.0) for _ in range(round(10 * per_s))]
    assert told == sorted(told)
    assert told[0] == pytest.approx(max(LEAST_S, 1 / per_s), rel=0.1)
    assert told[-1] == pytest.approx(10.0, rel=0.1)


def test_what_needs_more_waits_longer() -> None:
    turnover = used(10.0, amount=100)
    assert turnover.after_s(5_000, 20.0) == pytest.approx(5.0, rel=0.05)
    assert turnover.after_s(1_000, 20.0) == pytest.approx(1.0, rel=0.05), "what is large is not before what is small"


def test_of_many_releases_the_last_ones_count() -> None:
    turnover = Turnover()
    for number in range(400):
        turnover.free(1000 if number < 100 else 1, number / 20)
    assert turnover.after_s(200, 20.0) == pytest.approx(10.0, rel=0.05), "20 per second"


def test_time_in_which_nothing_is_freed_counts() -> None:
    assert used(1.0).after_s(5, 20.0) == pytest.approx(5.0, rel=0.1)
    assert used(1.0, until_s=10.0).after_s(5, 20.0) == pytest.approx(10.0, rel=0.1)


def test_places_that_nobody_came_for_are_given_again() -> None:
    turnover = used(10.0)
    assert [turnover.refuse("a", 20.0) for _ in range(50)][-1] == pytest.approx(5.0, rel=0.05)
    for number in range(100):
        turnover.free(1, 20.0 + number / 10)
    assert turnover.refuse("a", 30.0) == LEAST_S


def test_callers_that_do_not_wait_move_nobody_else() -> None:
    turnover = used(10.0)
    assert [turnover.refuse("greedy", 20.0) for _ in range(1000)][-1] == LONGEST_S
    assert turnover.refuse("polite", 20.0) == LEAST_S
    turnover.rest()
    assert turnover.refuse("greedy", 20.0) == LEAST_S, "there was room for all of them"


def test_few_callers_are_remembered() -> None:
    turnover = used(10.0)
    for number in range(5000):
        assert turnover.refuse(str(number), 20.0) == LEAST_S
    assert len(turnover._told_s) <= 1024


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 1 << 20), st.booleans()), max_size=600))
def test_it_is_always_within_bounds(events: list[tuple[float, int, bool]]) -> None:
    turnover, now_s = Turnover(), 0.0
    for passed_s, amount, frees in events:
        now_s += passed_s
        if frees:
            turnover.free(amount, now_s)
        else:
            assert LEAST_S <= turnover.refuse("ab"[amount % 2], now_s) <= LONGEST_S
            assert LEAST_S <= turnover.after_s(amount, now_s) <= LONGEST_S
