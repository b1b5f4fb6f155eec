from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.queue_position import AGEING_S, QueuePosition, RelativeQueuePosition
from triptych.policy.queueing import (
    PATIENCE_S,
    SHARE_NBYTES_PER_S,
    after_share,
    as_called,
    batch_length,
    by_deadline,
    by_slo,
)


def arrived(at_s: float, deadline_s: float, arrival: int, priority: int = 0) -> QueuePosition:
    return by_deadline(priority=priority, deadline_s=deadline_s, arrived_s=at_s, arrival=arrival)


def objective(
    at_s: float, due_s: float, arrival: int, *, priority: int = 0, deadline_s: float = 600.0, needs_s: float = 0.0
) -> QueuePosition:
    return by_slo(
        priority=priority, deadline_s=deadline_s, arrived_s=at_s, arrival=arrival, due_s=due_s, needs_s=needs_s
    )


def in_order(queue_positions: list[QueuePosition], now_s: float) -> list[int]:
    return [position.arrival for position in sorted(position.at(now_s) for position in queue_positions)]


def test_with_equal_timeouts_a_short_request_passes_a_long_one_that_came_before_it() -> None:
    long, short = objective(0.0, 10.0, 0), objective(5.0, 5.5, 1)
    assert in_order([long, short], 5.0) == [1, 0]
    assert in_order([arrived(0.0, 600.0, 0), arrived(5.0, 605.0, 1)], 5.0) == [0, 1], "by deadline it does not"


def test_what_is_lost_goes_behind_what_can_still_be_met_and_keeps_its_order() -> None:
    queue_positions = [objective(0.0, 4.0, 0, needs_s=1.0), objective(1.0, 3.5, 1, needs_s=1.0), objective(2.0, 5.5, 2)]
    assert in_order(queue_positions, 2.5) == [1, 0, 2], "at the last moment to begin it is not lost"
    assert in_order(queue_positions, 2.6) == [0, 2, 1]
    assert in_order(queue_positions, 3.1) == [2, 1, 0], (
        "those that are lost go by arrival and four times their objectives"
    )


def test_what_is_lost_is_not_overtaken_by_what_came_much_later() -> None:
    lost = objective(0.0, 1.0, 0)
    assert in_order([lost, objective(1.1, 3.9, 1)], 1.1) == [1, 0]
    assert in_order([lost, objective(1.1, 4.1, 1)], 1.1) == [0, 1], "it is due again after four times its objective"
    lost = objective(0.0, 27.0, 0)
    assert in_order([lost, objective(AGEING_S - 2, AGEING_S - 1, 1)], AGEING_S - 2) == [1, 0]
    assert in_order([lost, objective(AGEING_S, AGEING_S + 1, 1)], AGEING_S) == [0, 1]


def test_a_long_objective_that_is_missed_is_not_waited_for_four_times() -> None:
    """What comes within ``PATIENCE_S`` after it was due passes it, as far as it is due by then."""
    lost, passes, comes_too_late = (
        objective(0.0, 10.0, 0),
        objective(9.0, 10.0 + PATIENCE_S - 0.1, 1),
        objective(9.0, 10.0 + PATIENCE_S + 0.1, 2),
    )
    assert in_order([lost, passes, comes_too_late], 10.1) == [1, 0, 2]


def test_late_requests_go_by_age_and_by_what_they_need() -> None:
    """Objectives are multiples of what requests take alone."""
    old, large, small = objective(0.0, 10.0, 0), objective(3.0, 13.0, 1), objective(4.0, 9.0, 2)
    assert in_order([old, large, small], 13.1) == [2, 0, 1]


@given(
    at_s=st.floats(0, 100),
    objective_s=st.floats(0.01, 100),
    timeout_s=st.floats(0.01, 600),
    needs_s=st.floats(0, 50),
)
def test_a_late_request_is_passed_for_a_bounded_time(
    at_s: float, objective_s: float, timeout_s: float, needs_s: float
) -> None:
    queue_position = objective(at_s, at_s + objective_s, 0, deadline_s=at_s + timeout_s, needs_s=needs_s)
    if objective_s < timeout_s:
        assert queue_position.aged_s <= at_s + objective_s + PATIENCE_S
    assert queue_position.due_s <= queue_position.aged_s <= at_s + AGEING_S
    assert queue_position.at(inf).at(inf) == queue_position.at(inf)


def test_what_has_missed_its_objective_ages_with_its_deadline_and_does_not_starve_until_then() -> None:
    lost = objective(0.0, 1.5, 0, deadline_s=4.0)
    assert in_order([lost, objective(1.4, 1.9, 1)], 1.6) == [1, 0]
    assert in_order([lost, objective(1.6, 2.1, 1)], 1.6) == [0, 1], "half of its time has passed"


def test_a_shorter_deadline_of_the_caller_wins_over_the_objective() -> None:
    patient, hurried = objective(0.0, 8.0, 0), objective(1.0, 9.0, 1, deadline_s=4.0, needs_s=1.0)
    assert in_order([patient, hurried], 2.0) == [1, 0]
    assert in_order([patient, hurried], 3.5) == [0, 1], "and decides when it is lost"


def test_a_priority_goes_above_every_objective_even_when_lost() -> None:
    lost, low = objective(0.0, 1.0, 0), objective(0.0, 5.0, 1, priority=1)
    assert in_order([low, lost], 3.0) == [0, 1]


def test_a_request_without_an_objective_goes_by_its_deadline() -> None:
    assert objective(3.0, inf, 0, deadline_s=9.0)[:3] == arrived(3.0, 9.0, 0)[:3]


@given(at_s=st.floats(0, 100), due_s=st.floats(0, 200), needs_s=st.floats(0, 50), later_s=st.floats(0, 100))
def test_an_instance_orders_a_call_as_its_caller_does_on_another_clock(
    at_s: float, due_s: float, needs_s: float, later_s: float
) -> None:
    here, now_s, ahead_s = objective(at_s, due_s, 7, needs_s=needs_s), at_s + later_s, 1000.0
    there = as_called(
        priority=0,
        deadline_s=ahead_s + 600.0,
        arrived_s=now_s + ahead_s,
        arrival=7,
        position=here.relative(now_s),
    )
    assert there.aged_s == pytest.approx(here.aged_s + ahead_s)
    assert there.due_s == pytest.approx(here.due_s + ahead_s)
    assert there.lost_s == pytest.approx(here.lost_s + ahead_s)


def test_a_call_without_durations_goes_by_its_deadline() -> None:
    called = as_called(priority=1, deadline_s=9.0, arrived_s=2.0, arrival=3, position=RelativeQueuePosition())
    assert called == arrived(2.0, 9.0, 3, priority=1)


def test_what_is_never_lost_keeps_its_position() -> None:
    called = as_called(priority=0, deadline_s=9.0, arrived_s=2.0, arrival=3, position=RelativeQueuePosition(1.0))
    assert (called.at(1e6), called.relative(5.0).lost_in_s) == (called, None)


def test_the_earliest_deadline_is_first_and_ties_go_by_arrival() -> None:
    late, second, first = arrived(0.0, 9.0, 0), arrived(0.0, 5.0, 2), arrived(0.0, 5.0, 1)
    assert sorted([late, second, first]) == [first, second, late]


def test_a_lower_priority_number_goes_first_regardless_of_deadlines() -> None:
    urgent, last = arrived(0.0, 1.0, 0), arrived(0.0, 0.5, 1, priority=1)
    first, second = arrived(50.0, 90.0, 2, priority=-1), arrived(0.0, 5.0, 3)
    assert sorted([urgent, last, first, second]) == [first, urgent, second, last]


def test_a_distant_deadline_is_overtaken_only_until_the_ageing_time() -> None:
    patient = arrived(0.0, 600.0, 0)
    assert arrived(AGEING_S - 1.1, AGEING_S - 0.1, 1) < patient
    assert patient < arrived(AGEING_S, AGEING_S + 0.1, 2)


@pytest.mark.parametrize("objective_s", [None, 1.0, 20.0])
@given(
    requests=st.lists(st.tuples(st.floats(0, 120), st.floats(0.1, 600), st.integers(-1, 1)), min_size=1, max_size=60),
    service_s=st.floats(0.1, 3),
)
def test_a_request_is_not_overtaken_by_much_later_ones_of_its_priority(
    objective_s: float | None, requests: list[tuple[float, float, int]], service_s: float
) -> None:
    """``objective_s``: of every other request; the others, or all, go by their deadlines."""
    came = sorted(requests)
    queue_positions = [
        arrived(at_s, at_s + timeout_s, n, priority)
        if objective_s is None or n % 2
        else objective(at_s, at_s + objective_s, n, priority=priority, deadline_s=at_s + timeout_s, needs_s=service_s)
        for n, (at_s, timeout_s, priority) in enumerate(came)
    ]
    waiting, served, now_s, at = list[int](), list[int](), 0.0, 0
    while waiting or at < len(came):
        while at < len(came) and came[at][0] <= now_s:
            waiting.append(at)
            at += 1
        if waiting:
            served.append(min(waiting, key=lambda number: queue_positions[number].at(now_s)))
            waiting.remove(served[-1])
        now_s += service_s
    for place, number in enumerate(served):
        for other in served[:place]:
            if came[other][2] == came[number][2]:
                assert came[other][0] <= came[number][0] + AGEING_S
            elif came[other][2] > came[number][2]:
                assert came[other][0] <= came[number][0], "it was served before the other arrived"


def test_a_request_with_many_pulled_bytes_is_less_urgent_within_its_priority() -> None:
    huge, small, behind = QueuePosition(0, 10.0, 0), QueuePosition(0, 10.5, 1), QueuePosition(1, 0.0, 2)
    assert huge < small
    assert small < after_share(huge, SHARE_NBYTES_PER_S) < behind
    assert after_share(huge, 0) == huge


def test_bounds_of_a_batch_are_inclusive() -> None:
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
        return sum(size[0] for size in taken) <= max_tokens and sum(size[1] for size in taken) <= max_nbytes

    assert length <= 1 or fits(length)
    if 0 < length < min(len(sizes), max_items):
        assert not fits(length + 1)


def test_a_request_that_has_missed_its_objective_is_due_again_after_four_times_that() -> None:
    position = by_slo(priority=0, deadline_s=900.0, arrived_s=100.0, arrival=0, due_s=101.0)
    assert position.aged_s == 104.0
