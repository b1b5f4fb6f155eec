import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.client.retries import Retries, RetryPolicy
from triptych.errors import InvalidRequest, Overloaded, Unavailable, tree


class Always:
    """An Rng with a constant value."""

    def __init__(self, value: float) -> None:
        self._value = value

    def random(self) -> float:
        return self._value

    def getrandbits(self, k: int, /) -> int:
        return 0


def test_only_retryable_errors_are_retried() -> None:
    for error in tree().values():
        wait_s = Retries(RetryPolicy(), Always(0.5)).wait_s(error("x"), 1, 60)
        assert (wait_s is not None) == error.retryable, error


def test_backoff_doubles_up_to_its_bound_with_jitter() -> None:
    policy = RetryPolicy(max_attempts=9, initial_backoff_s=0.1, max_backoff_s=0.5)
    retries = Retries(policy, Always(1.0))
    waits = [retries.wait_s(Unavailable("x"), attempt, 60) for attempt in range(1, 6)]
    assert waits == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert Retries(policy, Always(0.0)).wait_s(Unavailable("x"), 1, 60) == 0


def test_retry_after_is_respected() -> None:
    retries = Retries(RetryPolicy(), Always(0.5))
    assert retries.wait_s(Overloaded("x", retry_after_s=3.0), 1, 60) == pytest.approx(3.05)


def test_no_wait_exceeds_the_deadline() -> None:
    assert Retries(RetryPolicy(), Always(0.5)).wait_s(Overloaded("x", retry_after_s=3.0), 1, 3.0) is None


def test_attempts_are_bounded() -> None:
    retries = Retries(RetryPolicy(max_attempts=2), Always(0.5))
    assert retries.wait_s(Unavailable("x"), 1, 60) is not None
    assert retries.wait_s(Unavailable("x"), 2, 60) is None


def test_successes_refill_the_retry_budget() -> None:
    retries = Retries(RetryPolicy(budget=2, refill=0.5), Always(0.5))
    assert [retries.wait_s(Unavailable("x"), 1, 60) is None for _ in range(3)] == [False, False, True]
    retries.succeeded()
    assert retries.wait_s(Unavailable("x"), 1, 60) is None
    retries.succeeded()
    assert retries.wait_s(Unavailable("x"), 1, 60) is not None


@given(outcomes=st.lists(st.booleans(), max_size=300), seed=st.integers(0, 9))
def test_retries_never_exceed_what_the_budget_allows(outcomes: list[bool], seed: int) -> None:
    policy = RetryPolicy(budget=5, refill=0.1)
    retries = Retries(policy, random.Random(seed))
    spent = 0
    for index, ok in enumerate(outcomes):
        if ok:
            retries.succeeded()
        elif retries.wait_s(Unavailable("x"), 1, 60) is not None:
            spent += 1
        assert spent <= policy.budget + policy.refill * (index + 1)


def test_an_invalid_retry_policy_is_refused() -> None:
    for bad in ({"max_attempts": 0}, {"budget": -1.0}):
        with pytest.raises(ValueError, match=r"max_attempts|negative"):
            RetryPolicy(**bad)
    assert Retries(RetryPolicy(max_attempts=1), Always(0)).wait_s(Unavailable("x"), 1, 60) is None
    assert Retries(RetryPolicy(), Always(0)).wait_s(InvalidRequest("x"), 1, 60) is None
