import pytest

from triptych.domain.queue_position import QueuePosition
from triptych.machine.router.shared_events import CreditsWanted
from triptych.machine.router.waiting_requests import WaitingRequests


def wanted(request: int, due_s: float, lost_s: float = 100.0, *, priority: int = 0) -> CreditsWanted:
    return CreditsWanted(
        request, (), wait=True, queue_position=QueuePosition(priority, due_s, request, lost_s, aged_s=50.0)
    )


def order(waiting: WaitingRequests[CreditsWanted]) -> list[int]:
    waiting.validate()
    return [entry.wanted.request for entry in waiting.in_order]


def test_they_are_served_by_their_turns_and_those_that_are_lost_behind_them() -> None:
    waiting = WaitingRequests()
    for request in (wanted(1, 9.0), wanted(2, 5.0, lost_s=4.0), wanted(3, 7.0), wanted(4, 99.0, priority=-1)):
        waiting.add(request, 1.0)
    assert order(waiting) == [4, 2, 3, 1]
    waiting.put_lost_back(4.0)
    assert order(waiting) == [4, 2, 3, 1]
    waiting.put_lost_back(4.1)
    assert order(waiting) == [4, 3, 1, 2]
    assert waiting.longest_s(6.0) == {0: 5.0, -1: 5.0}


def test_one_may_leave_while_they_are_gone_through() -> None:
    waiting = WaitingRequests()
    for request in range(4):
        waiting.add(wanted(request, request), 0.0)
    for entry in waiting.in_order.copy():
        if entry.wanted.request % 2:
            waiting.remove(entry.wanted.request)
    waiting.remove(99)
    assert order(waiting) == [0, 2]


def test_what_could_not_be_placed_is_known_until_the_encoders_change_or_it_leaves() -> None:
    waiting = WaitingRequests()
    for request in range(3):
        waiting.add(wanted(request, request), 0.0)
        waiting.cannot_be_placed(request)
    waiting.remove(0)
    waiting.validate()
    assert waiting.is_known_unplaceable(1)
    waiting.encoders_changed()
    assert not waiting.is_known_unplaceable(1)
    waiting.cannot_be_placed(0)
    with pytest.raises(AssertionError, match="unplaceable but gone"):
        waiting.validate()
