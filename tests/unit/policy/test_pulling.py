"""Which pull goes first."""

from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.pulling import SHARE_NBYTES_PER_S, WaitingPull, pull_order


def pull(number: int, deadline_s: float, had_nbytes: int = 0) -> WaitingPull:
    return WaitingPull(number, deadline_s, had_nbytes, number)


def test_urgency_first_then_arrival() -> None:
    waiting = [pull(0, 30.0), pull(1, 5.0), pull(2, 30.0), pull(3, 7.0)]
    assert [one.pull_id for one in sorted(waiting, key=pull_order)] == [1, 3, 0, 2]


def test_a_request_that_had_a_seconds_share_counts_as_a_second_less_urgent() -> None:
    had_much, later = pull(0, 10.0, SHARE_NBYTES_PER_S), pull(1, 10.9)
    assert pull_order(later) < pull_order(had_much) < pull_order(pull(2, 11.1))


@given(
    deadline_s=st.floats(0, 1e6), had_nbytes=st.integers(0, 1 << 40), timeout_s=st.floats(0.1, 3600), now_s=st.floats(0)
)
def test_what_waits_is_not_overtaken_for_ever(
    deadline_s: float, had_nbytes: int, timeout_s: float, now_s: float
) -> None:
    waits = pull(0, deadline_s, had_nbytes)
    comes = pull(1, now_s + timeout_s)
    if now_s > deadline_s + had_nbytes / SHARE_NBYTES_PER_S:
        assert pull_order(waits) < pull_order(comes)
