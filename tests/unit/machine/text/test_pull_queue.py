"""Turns to pull: urgency, fair shares, bounds in bytes, under any order of events."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.domain.embedding import HolderRef
from triptych.machine.text.pull_queue import Begin, Drop, Effect, Ended, Hasten, PullLimits, PullQueue, Want
from triptych.policy.pulling import SHARE_NBYTES_PER_S

LIMITS = PullLimits(max_nbytes=100, max_holder_nbytes=60, max_holder_pulls=3)


def queue(limits: PullLimits = LIMITS) -> PullQueue:
    return PullQueue(limits)


def want(pull_id: int, *, request: str = "r", holder: str = "e", nbytes: int = 20, deadline_s: float = 10.0) -> Want:
    return Want(pull_id, request, HolderRef("", holder, 1), nbytes, deadline_s)


def begun(effects: list[Effect]) -> list[int]:
    return [effect.pull_id for effect in effects]


def test_pulls_from_several_encoders_begin_at_once() -> None:
    pulls = queue()
    assert [begun(pulls.handle(want(n, holder=f"e{n}"), 0.0)) for n in range(5)] == [[0], [1], [2], [3], [4]]
    assert begun(pulls.handle(want(5, holder="e5"), 0.0)) == []
    assert (pulls.under_way, pulls.waiting, pulls.nbytes_under_way) == (5, 1, 100)


def test_the_most_urgent_is_next_and_ties_are_served_as_they_came() -> None:
    pulls = queue(PullLimits(20, 20, 1))
    pulls.handle(want(0), 0.0)
    for pull_id, deadline_s in ((1, 30.0), (2, 20.0), (3, 20.0), (4, 5.0)):
        pulls.handle(want(pull_id, request=f"r{pull_id}", deadline_s=deadline_s), 0.0)
    order = [begun(pulls.handle(Ended(running), 0.0)) for running in (0, 4, 2, 3)]
    assert order == [[4], [2], [3], [1]]


def test_an_embedding_becomes_as_urgent_as_the_most_urgent_who_needs_it() -> None:
    pulls = queue(PullLimits(20, 20, 1))
    for pull_id, deadline_s in ((0, 1.0), (1, 10.0), (2, 20.0), (3, 15.0)):
        pulls.handle(want(pull_id, request=f"r{pull_id}", deadline_s=deadline_s), 0.0)
    pulls.handle(Hasten(2, "urgent", 5.0), 0.0)
    pulls.handle(Hasten(1, "patient", 50.0), 0.0)
    for under_way_or_unknown in (0, 99):
        assert pulls.handle(Hasten(under_way_or_unknown, "urgent", 0.0), 0.0) == []
    pulls.validate()
    assert [begun(pulls.handle(Ended(running), 0.0)) for running in (0, 2, 1)] == [[2], [1], [3]]


def test_who_is_no_more_urgent_does_not_take_a_pull_over() -> None:
    part = SHARE_NBYTES_PER_S
    pulls = queue(PullLimits(part, part, 8))
    for pull_id in range(2):
        pulls.handle(want(pull_id, request="huge", nbytes=part, deadline_s=10.0), 0.0)
    pulls.handle(want(2, request="small", nbytes=part, deadline_s=10.5), 0.0)
    pulls.handle(Hasten(1, "new", 10.0), 0.0)
    assert begun(pulls.handle(Ended(0), 0.0)) == [2], "the huge one had its share of this second"


def test_a_huge_request_is_overtaken_by_small_ones_between_its_pulls() -> None:
    part = SHARE_NBYTES_PER_S // 10
    pulls = queue(PullLimits(part, part, 8))
    for pull_id in range(20):
        pulls.handle(want(pull_id, request="huge", nbytes=part, deadline_s=60.0), 0.0)
    pulls.handle(want(100, request="small", nbytes=part, deadline_s=60.25), 0.0)
    order = [0]
    while pulls.waiting:
        order += begun(pulls.handle(Ended(order[-1]), 0.0))
    assert order.index(100) == 3, "after three tenths of a second's share of the huge request"
    assert sorted(order) == [*range(20), 100]


def test_a_large_pull_waits_for_its_bytes_and_is_not_starved_by_small_ones() -> None:
    pulls = queue()
    assert begun(pulls.handle(want(0, holder="a", nbytes=60), 0.0)) == [0]
    assert begun(pulls.handle(want(1, holder="b", nbytes=500, request="large"), 0.0)) == []
    assert begun(pulls.handle(want(2, holder="c", nbytes=10, request="late", deadline_s=99.0), 0.0)) == []
    assert begun(pulls.handle(Ended(0), 0.0)) == [1]
    assert begun(pulls.handle(Ended(1), 0.0)) == [2]


def test_a_holder_that_hangs_leaves_room_for_others() -> None:
    pulls = queue()
    for pull_id in range(6):
        pulls.handle(want(pull_id, holder="hung", nbytes=30, deadline_s=1.0), 0.0)
    assert (pulls.under_way, pulls.nbytes_under_way) == (2, 60)
    assert begun(pulls.handle(want(9, holder="good", nbytes=40, deadline_s=50.0), 0.0)) == [9]


def test_pulls_and_bytes_from_one_holder_are_bounded_and_come_free_one_by_one() -> None:
    pulls = queue()
    for pull_id in range(5):
        pulls.handle(want(pull_id, nbytes=10), 0.0)
    assert (pulls.under_way, pulls.waiting) == (3, 2)
    assert begun(pulls.handle(Ended(0), 0.0)) == [3]
    pulls = queue()
    for pull_id in range(3):
        pulls.handle(want(pull_id, nbytes=30), 0.0)
    assert (pulls.under_way, pulls.waiting) == (2, 1)
    assert begun(pulls.handle(Ended(1), 0.0)) == [2]


def test_a_pull_is_wanted_once_whether_it_waits_or_is_under_way() -> None:
    pulls = queue(PullLimits(20, 20, 1))
    for pull_id in (0, 1):
        pulls.handle(want(pull_id), 0.0)
    for pull_id in (0, 1):
        with pytest.raises(ValueError, match="here already"):
            pulls.handle(want(pull_id), 0.0)


def test_a_dropped_pull_never_begins() -> None:
    pulls = queue(PullLimits(20, 20, 1))
    for pull_id in range(3):
        pulls.handle(want(pull_id), 0.0)
    assert pulls.handle(Drop(1), 0.0) == []
    assert begun(pulls.handle(Ended(0), 0.0)) == [2]
    assert pulls.handle(Ended(2), 0.0) == []
    pulls.validate()


class AnyOrder(RuleBasedStateMachine):
    """Bounds hold, every pull gets one turn at most, and all that are not dropped get one in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.pulls = queue()
        self.number = 0
        self.waiting: set[int] = set()
        self.under_way: set[int] = set()

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, Begin)
            self.waiting.remove(effect.pull_id)
            self.under_way.add(effect.pull_id)

    @rule(
        request=st.sampled_from("abc"),
        holder=st.sampled_from("xyz"),
        nbytes=st.integers(1, 130),
        deadline_s=st.integers(0, 9),
    )
    def want(self, request: str, holder: str, nbytes: int, deadline_s: int) -> None:
        self.number += 1
        self.waiting.add(self.number)
        event = want(self.number, request=request, holder=holder, nbytes=nbytes, deadline_s=deadline_s)
        self.note(self.pulls.handle(event, 0.0))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), drop=st.booleans())
    def change(self, data: st.DataObject, *, drop: bool) -> None:
        pull_id = data.draw(st.sampled_from(sorted(self.waiting)))
        if drop:
            self.waiting.remove(pull_id)
        self.note(self.pulls.handle(Drop(pull_id) if drop else Hasten(pull_id, "d", 0.0), 0.0))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        pull_id = data.draw(st.sampled_from(sorted(self.under_way)))
        self.under_way.remove(pull_id)
        self.note(self.pulls.handle(Ended(pull_id), 0.0))

    @invariant()
    def holds(self) -> None:
        self.pulls.validate()
        assert (self.pulls.waiting, self.pulls.under_way) == (len(self.waiting), len(self.under_way))

    def teardown(self) -> None:
        while self.under_way:
            pull_id = self.under_way.pop()
            self.note(self.pulls.handle(Ended(pull_id), 0.0))
        assert not self.waiting
        assert self.pulls.nbytes_under_way == 0


TestAnyOrder = AnyOrder.TestCase
