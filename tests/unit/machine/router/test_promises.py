"""Places that refused requests are promised."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.examples import examples
from triptych.machine.router.promises import EARLY_S, GRACE_S, LONGEST_S, PROMISED_SHARE, Promises

TAKES_S = 2.0
APART_S = TAKES_S / PROMISED_SHARE


def promised(promises: Promises, content: int, *, tenant: str = "a", after_s: float = 1.0, now_s: float = 0.0) -> float:
    after_s = promises.promise(tenant, content, after_s=after_s, takes_s=TAKES_S, now_s=now_s)
    promises.validate()
    return after_s


def test_each_refused_request_is_promised_a_later_place_of_its_tenant() -> None:
    promises = Promises()
    assert [promised(promises, number) for number in range(3)] == pytest.approx([1.0, 1.0 + APART_S, 1.0 + 2 * APART_S])
    assert promised(promises, 9, tenant="b") == 1.0
    assert promised(promises, 10, now_s=100.0) == 1.0, "what is past is not waited for"


def test_a_request_is_due_around_its_place_and_once() -> None:
    promises = Promises()
    place_s = promised(promises, 7, after_s=5.0)
    times = [place_s - EARLY_S - 0.1, place_s - EARLY_S, place_s + GRACE_S]
    assert [promises.is_due(7, at_s) for at_s in times] == [False, True, True]
    assert not promises.is_due(8, place_s)
    promises.take(7)
    promises.validate()
    assert not promises.is_due(7, place_s)
    promised(promises, 7)
    assert not promises.is_due(7, 100.0)
    promised(promises, 8, now_s=100.0)
    assert len(promises) == 1, "what is past is forgotten"


def test_who_comes_early_gets_no_further_place_and_takes_none_of_others() -> None:
    """However often: those who obey Retry-After would find all places given away."""
    promises = Promises()
    place_s = promised(promises, 7)
    for _ in range(100):
        promised(promises, 7, now_s=0.1)
    assert promised(promises, 8) == place_s + APART_S
    assert promises.is_due(7, place_s)
    promises.take(7)
    assert not promises.is_due(7, place_s + APART_S)


def test_what_is_past_is_forgotten_whoever_comes_again_and_again() -> None:
    promises = Promises()
    for content in (7, 8):
        promised(promises, content)
    for _ in range(100):
        promised(promises, 7, now_s=0.1)
    promised(promises, 9, now_s=50.0)
    assert len(promises) == 2, "8 is past"
    promises = Promises()
    for content in (7, 8):
        promised(promises, content)
    promises.take(7)
    promised(promises, 7, after_s=50.0, now_s=1.0)
    promised(promises, 9, now_s=40.0)
    assert len(promises) == 2, "7 has a new place, 8 is past"


def test_equal_requests_are_told_different_times() -> None:
    promises = Promises()
    told = [promised(promises, 7) for _ in range(3)]
    assert told == pytest.approx([1.0, 1.0 + APART_S, 1.0 + 2 * APART_S])
    promises.take(7)
    assert promised(promises, 7, now_s=1.0) == pytest.approx(APART_S), "the next place"
    assert promised(promises, 7, now_s=1.0) == pytest.approx(3 * APART_S), "behind all that were told before"


def test_nothing_is_promised_beyond_a_minute() -> None:
    promises = Promises()
    places = [promised(promises, number) for number in range(40)]
    assert max(places) == LONGEST_S
    assert len(promises) == sum(place_s < LONGEST_S for place_s in places) < 40
    assert not promises.is_due(39, LONGEST_S)


def test_others_see_what_is_promised_of_the_time_that_they_have() -> None:
    promises = Promises()
    for number in range(4):
        promised(promises, number, after_s=0.0)
    assert promises.ahead_s("a", 5.0, 0.0) == pytest.approx(5.0 * PROMISED_SHARE)
    assert promises.ahead_s("a", 100.0, 0.0) == pytest.approx(4 * TAKES_S)
    assert promises.ahead_s("a", 5.0, 4 * APART_S) == 0.0
    assert promises.ahead_s("b", 5.0, 0.0) == 0.0


class Steps(RuleBasedStateMachine):
    """The number of promises stays bounded and right."""

    def __init__(self) -> None:
        super().__init__()
        self.promises = Promises()
        self.now_s = 0.0

    @rule(tenant=st.sampled_from("ab"), content=st.integers(0, 5), after_s=st.floats(0, 100))
    def refuse(self, tenant: str, content: int, after_s: float) -> None:
        place_s = self.promises.promise(tenant, content, after_s=after_s, takes_s=0.5, now_s=self.now_s)
        assert 0 <= place_s <= LONGEST_S

    @rule(content=st.integers(0, 5), passed_s=st.floats(0, 30))
    def come_back(self, content: int, passed_s: float) -> None:
        self.now_s += passed_s
        if self.promises.is_due(content, self.now_s):
            self.promises.take(content)

    @invariant()
    def adds_up(self) -> None:
        self.promises.validate()


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
