from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.domain.embedding import HolderRef
from triptych.domain.queue_position import QueuePosition
from triptych.machine.text.pull_queue import PullLimits, PullQueue
from triptych.policy.queueing import SHARE_NBYTES_PER_S

LIMITS = PullLimits(max_pulling_bytes=100, max_encoder_share=0.6, max_pulls_per_encoder=3)


class Pulls(PullQueue):
    """Requests of one priority; each pull that starts is recorded."""

    def want_one(
        self, pull_id: int, *, request: str = "r", holder: str = "e", nbytes: int = 20, due_s: float = 10.0
    ) -> list[int]:
        self.want(pull_id, request, QueuePosition(0, due_s, 0), HolderRef("", holder, 1), nbytes)
        return self.begin(0.0)

    def end_one(self, pull_id: int) -> list[int]:
        self.end(pull_id)
        return self.begin(0.0)


def queue(limits: PullLimits = LIMITS) -> Pulls:
    return Pulls(limits)


def test_pulls_from_several_encoders_start_at_once() -> None:
    pulls = queue()
    assert [pulls.want_one(n, holder=f"e{n}") for n in range(5)] == [[0], [1], [2], [3], [4]]
    assert pulls.want_one(5, holder="e5") == []
    assert (pulls.under_way, pulls.waiting, pulls.nbytes_under_way) == (5, 1, 100)


def test_the_most_urgent_pull_is_next_and_ties_go_by_arrival() -> None:
    pulls = queue(PullLimits(20, 1.0, 1))
    pulls.want_one(0)
    for pull_id, due_s in ((1, 30.0), (2, 20.0), (3, 20.0), (4, 5.0)):
        pulls.want_one(pull_id, request=f"r{pull_id}", due_s=due_s)
    order = [pulls.end_one(running) for running in (0, 4, 2, 3)]
    assert order == [[4], [2], [3], [1]]


def test_the_pull_of_what_is_lost_goes_behind_the_others() -> None:
    pulls = queue(PullLimits(20, 1.0, 1))
    pulls.want_one(0)
    pulls.want(1, "lost", QueuePosition(0, 1.0, 1, lost_s=0.5, aged_s=30.0), HolderRef("", "e", 1), 20)
    pulls.want(2, "short", QueuePosition(0, 3.0, 2, lost_s=2.5, aged_s=31.0), HolderRef("", "e", 1), 20)
    pulls.end(0)
    assert pulls.begin(1.0) == [2]


def test_an_embedding_has_the_urgency_of_its_most_urgent_request() -> None:
    pulls = queue(PullLimits(20, 1.0, 1))
    for pull_id, due_s in ((0, 1.0), (1, 10.0), (2, 20.0), (3, 15.0)):
        pulls.want_one(pull_id, request=f"r{pull_id}", due_s=due_s)
    pulls.hasten(2, "urgent", QueuePosition(0, 5.0, 0))
    pulls.hasten(1, "patient", QueuePosition(0, 50.0, 0))
    for under_way_or_unknown in (0, 99):
        pulls.hasten(under_way_or_unknown, "urgent", QueuePosition(0, 0.0, 0))
    pulls.validate()
    assert [pulls.end_one(running) for running in (0, 2, 1)] == [[2], [1], [3]]


def test_a_less_urgent_request_does_not_take_over_a_pull() -> None:
    part = SHARE_NBYTES_PER_S
    pulls = queue(PullLimits(part, 1.0, 8))
    for pull_id in range(2):
        pulls.want_one(pull_id, request="huge", nbytes=part, due_s=10.0)
    pulls.want_one(2, request="small", nbytes=part, due_s=10.5)
    pulls.hasten(1, "new", QueuePosition(0, 10.0, 0))
    assert pulls.end_one(0) == [2], "the huge request has used its share of this second"


def test_a_huge_request_is_overtaken_by_small_ones_between_its_pulls() -> None:
    part = SHARE_NBYTES_PER_S // 10
    pulls = queue(PullLimits(part, 1.0, 8))
    for pull_id in range(20):
        pulls.want_one(pull_id, request="huge", nbytes=part, due_s=60.0)
    pulls.want_one(100, request="small", nbytes=part, due_s=60.25)
    order = [0]
    while pulls.waiting:
        order += pulls.end_one(order[-1])
    assert order.index(100) == 3, "after three tenths of a second's share of the huge request"
    assert sorted(order) == [*range(20), 100]


def test_a_large_pull_waits_for_its_bytes_and_is_not_starved_by_small_ones() -> None:
    pulls = queue()
    assert pulls.want_one(0, holder="a", nbytes=60) == [0]
    assert pulls.want_one(1, holder="b", nbytes=500, request="large") == []
    assert pulls.want_one(2, holder="c", nbytes=10, request="late", due_s=99.0) == []
    assert pulls.end_one(0) == [1]
    assert pulls.end_one(1) == [2]


def test_a_hanging_holder_does_not_block_others() -> None:
    pulls = queue()
    for pull_id in range(6):
        pulls.want_one(pull_id, holder="hung", nbytes=30, due_s=1.0)
    assert (pulls.under_way, pulls.nbytes_under_way) == (2, 60)
    assert pulls.want_one(9, holder="good", nbytes=40, due_s=50.0) == [9]


def test_pulls_and_bytes_from_one_holder_are_bounded() -> None:
    pulls = queue()
    for pull_id in range(5):
        pulls.want_one(pull_id, nbytes=10)
    assert (pulls.under_way, pulls.waiting) == (3, 2)
    assert pulls.end_one(0) == [3]
    pulls = queue()
    for pull_id in range(3):
        pulls.want_one(pull_id, nbytes=30)
    assert (pulls.under_way, pulls.waiting) == (2, 1)
    assert pulls.end_one(1) == [2]


def test_a_dropped_pull_never_starts() -> None:
    pulls = queue(PullLimits(20, 1.0, 1))
    for pull_id in range(3):
        pulls.want_one(pull_id)
    pulls.drop(1)
    assert pulls.end_one(0) == [2]
    assert pulls.end_one(2) == []
    pulls.validate()


class AnyOrder(RuleBasedStateMachine):
    """Any order of events: bounds hold, and every pull that is not dropped starts exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.pulls = queue()
        self.number = 0
        self.waiting: set[int] = set()
        self.under_way: set[int] = set()

    def note(self, begun: list[int]) -> None:
        self.waiting -= set(begun)
        self.under_way |= set(begun)

    @rule(
        request=st.sampled_from("abc"),
        holder=st.sampled_from("xyz"),
        nbytes=st.integers(1, 130),
        due_s=st.integers(0, 9),
    )
    def want(self, request: str, holder: str, nbytes: int, due_s: int) -> None:
        self.number += 1
        self.waiting.add(self.number)
        self.note(self.pulls.want_one(self.number, request=request, holder=holder, nbytes=nbytes, due_s=due_s))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), drop=st.booleans())
    def change(self, data: st.DataObject, *, drop: bool) -> None:
        pull_id = data.draw(st.sampled_from(sorted(self.waiting)))
        if drop:
            self.waiting.remove(pull_id)
            self.pulls.drop(pull_id)
        else:
            self.pulls.hasten(pull_id, "d", QueuePosition(0, 0.0, 0))
        self.note(self.pulls.begin(0.0))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        pull_id = data.draw(st.sampled_from(sorted(self.under_way)))
        self.under_way.remove(pull_id)
        self.note(self.pulls.end_one(pull_id))

    @invariant()
    def holds(self) -> None:
        self.pulls.validate()
        assert (self.pulls.waiting, self.pulls.under_way) == (len(self.waiting), len(self.under_way))

    def teardown(self) -> None:
        while self.under_way:
            pull_id = self.under_way.pop()
            self.note(self.pulls.end_one(pull_id))
        assert not self.waiting
        assert self.pulls.nbytes_under_way == 0


TestAnyOrder = AnyOrder.TestCase
