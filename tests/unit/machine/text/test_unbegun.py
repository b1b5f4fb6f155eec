"""Requests that cannot be served in time any more get another queue position, once."""

from math import inf

from triptych.domain.queue_position import QueuePosition
from triptych.machine.text.unbegun import UnbegunPositions


def position(place: int, lost_s: float) -> QueuePosition:
    return QueuePosition(0, 1.0, place, lost_s, aged_s=50.0 + place)


def test_each_is_lost_once() -> None:
    unbegun = UnbegunPositions()
    assert unbegun.next_lost_s == inf
    for place, lost_s in enumerate((3.0, 1.0, 2.0)):
        unbegun.add(str(place), position(place, lost_s))
    assert unbegun.next_lost_s == 1.0
    assert unbegun.lost(1.0) == []
    assert unbegun.lost(2.5) == [("1", position(1, 1.0).at(2.5)), ("2", position(2, 2.0).at(2.5))]
    assert unbegun.lost(2.9) == []
    assert [name for name, _ in unbegun.lost(9.0)] == ["0"]
    assert sorted(unbegun.by_request) == ["0", "1", "2"], "they have not begun"


def test_those_that_have_begun_are_not_lost() -> None:
    unbegun = UnbegunPositions()
    for place in range(500):
        unbegun.add(str(place), position(place, float(place)))
        if place % 5:
            unbegun.discard(str(place))
    unbegun.discard("unknown")
    assert len(unbegun.by_request) == 100
    assert [name for name, _ in unbegun.lost(1000.0)] == [str(place) for place in range(0, 500, 5)]
