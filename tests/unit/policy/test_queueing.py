"""Who is next, and how large a batch is."""

from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.queueing import Waiting, batch_length, turn_order


def test_the_earliest_deadline_is_first_and_ties_are_served_as_they_came() -> None:
    waiting = [Waiting("late", 9.0, 0), Waiting("second", 5.0, 2), Waiting("first", 5.0, 1)]
    assert [one.request_id for one in turn_order(waiting)] == ["first", "second", "late"]


def test_a_lower_priority_goes_first_whatever_time_is_left() -> None:
    waiting = [
        Waiting("urgent", 1.0, 0),
        Waiting("last", 0.5, 1, 1),
        Waiting("first", 9.0, 2, -1),
        Waiting("next", 5.0, 3),
    ]
    assert [one.request_id for one in turn_order(waiting)] == ["first", "urgent", "next", "last"]


def test_a_batch_that_fills_its_bounds_to_the_last_is_within_them() -> None:
    sizes = [(5, 5), (5, 5), (1, 1)]
    assert batch_length(sizes, max_items=3, max_tokens=10, max_nbytes=99) == 2
    assert batch_length(sizes, max_items=3, max_tokens=99, max_nbytes=10) == 2


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=20),
    max_items=st.integers(1, 10),
    max_tokens=st.integers(1, 100),
    max_nbytes=st.integers(1, 100),
)
def test_a_batch_is_as_long_as_its_bounds_allow(
    sizes: list[tuple[int, int]], max_items: int, max_tokens: int, max_nbytes: int
) -> None:
    length = batch_length(sizes, max_items=max_items, max_tokens=max_tokens, max_nbytes=max_nbytes)
    assert length == 0 if not sizes else 1 <= length <= min(len(sizes), max_items)

    def fits(count: int) -> bool:
        taken = sizes[:count]
        return sum(one[0] for one in taken) <= max_tokens and sum(one[1] for one in taken) <= max_nbytes

    assert length <= 1 or fits(length)
    if 0 < length < min(len(sizes), max_items):
        assert not fits(length + 1)
