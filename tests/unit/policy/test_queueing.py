from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.queueing import AGEING_S, SHARE_NBYTES_PER_S, Turn, after_share, batch_length, turn


def arrived(at_s: float, deadline_s: float, arrival: int, priority: int = 0) -> Turn:
    return turn(priority=priority, deadline_s=deadline_s, arrived_s=at_s, arrival=arrival)


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


@given(
    requests=st.lists(st.tuples(st.floats(0, 120), st.floats(0.1, 600), st.integers(-1, 1)), min_size=1, max_size=60),
    service_s=st.floats(0.1, 3),
)
def test_a_request_is_not_overtaken_by_much_later_ones_of_its_priority(
    requests: list[tuple[float, float, int]], service_s: float
) -> None:
    came = sorted(requests)
    turns = [arrived(at_s, at_s + timeout_s, n, priority) for n, (at_s, timeout_s, priority) in enumerate(came)]
    waiting, served, now_s, at = list[int](), list[int](), 0.0, 0
    while waiting or at < len(came):
        while at < len(came) and came[at][0] <= now_s:
            waiting.append(at)
            at += 1
        if waiting:
            served.append(min(waiting, key=turns.__getitem__))
            waiting.remove(served[-1])
        now_s += service_s
    for place, one in enumerate(served):
        for other in served[:place]:
            if came[other][2] == came[one][2]:
                assert came[other][0] <= came[one][0] + AGEING_S
            elif came[other][2] > came[one][2]:
                assert came[other][0] <= came[one][0], "it was served before the other arrived"


def test_a_request_with_many_pulled_bytes_is_less_urgent_within_its_priority() -> None:
    huge, small, behind = Turn(0, 10.0, 0), Turn(0, 10.5, 1), Turn(1, 0.0, 2)
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
        return sum(one[0] for one in taken) <= max_tokens and sum(one[1] for one in taken) <= max_nbytes

    assert length <= 1 or fits(length)
    if 0 < length < min(len(sizes), max_items):
        assert not fits(length + 1)
