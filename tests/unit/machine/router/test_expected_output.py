from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.machine.router.expected_output import ExpectedOutput

TEXT, ITEMS = False, True
OPEN = 30_000
"""A limit that no answer comes near."""


def after(*answers: tuple[bool, int], times: int = 1000) -> ExpectedOutput:
    """What is expected after these answers, which ended by themselves, so many times each."""
    made = ExpectedOutput()
    for _ in range(times):
        for with_items, tokens in answers:
            made.observe(with_items, tokens, by_itself=True)
    return made


def test_until_there_are_answers_a_moderate_length_is_expected() -> None:
    assert ExpectedOutput().predict(TEXT, OPEN) == 256
    assert 200 < after((TEXT, 16), times=2).predict(TEXT, OPEN) < 256


def test_each_class_has_its_own_mean_beside_that_of_all() -> None:
    made = after((TEXT, 40), (ITEMS, 100))
    assert [made.predict(with_items, OPEN) for with_items in (TEXT, ITEMS)] == [
        pytest.approx(40, abs=2),
        pytest.approx(100, abs=3),
    ]
    assert made.predict(None, OPEN) == pytest.approx(70, abs=3)
    made.forget()
    assert [made.predict(with_items, OPEN) for with_items in (TEXT, ITEMS, None)] == [256, 256, 256]


def test_a_limit_cuts_off_what_would_come_after_it() -> None:
    made = after((TEXT, 100))
    assert made.predict(TEXT, 10) == 10
    assert made.predict(TEXT, 100) == pytest.approx(100 * (1 - 1 / 2.718), abs=2)
    assert made.predict(TEXT, 0) == 0


def test_answers_that_their_limit_has_ended_do_not_pull_the_mean_down() -> None:
    made, random = ExpectedOutput(), Random(3)
    for _ in range(2000):
        tokens, limit = int(random.expovariate(1 / 100)) + 1, random.choice((16, 64, 256))
        made.observe(TEXT, min(tokens, limit), by_itself=tokens <= limit)
    assert made.predict(TEXT, OPEN) == pytest.approx(100, rel=0.2)


def test_answers_that_never_end_by_themselves_are_as_long_as_they_may_be() -> None:
    made = ExpectedOutput()
    for _ in range(10_000):
        made.observe(TEXT, 16, by_itself=False)
    assert [made.predict(TEXT, limit) for limit in (1, 16, 128)] == [1, 16, 128]


def test_older_answers_fade_by_half_in_200() -> None:
    made = after((TEXT, 40), times=2000)
    for _ in range(200):
        made.observe(TEXT, 400, by_itself=True)
    assert made.predict(TEXT, OPEN) == pytest.approx(220, abs=5)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.booleans()), max_size=50), st.integers(1, 1 << 20))
def test_a_prediction_is_at_least_one_token_and_never_more_than_the_limit(
    answers: list[tuple[int, bool]], limit: int
) -> None:
    made = ExpectedOutput()
    for tokens, by_itself in answers:
        made.observe(TEXT, tokens, by_itself=by_itself)
    assert 1 <= made.predict(TEXT, limit) <= limit
