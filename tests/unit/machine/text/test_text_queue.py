"""The text instance's queue under any order of events."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from triptych.machine.text.text_queue import (
    AllPulled,
    Arrive,
    Effect,
    Leave,
    QueueLimits,
    Refuse,
    StartPulls,
    StartRun,
    TextQueue,
)
from triptych.policy.queueing import Turn

_arrivals = iter(range(1 << 60))
LIMITS = QueueLimits(max_waiting=4, max_running=2, max_pulling_requests_nbytes=100)


def arrive(name: str, *, items: int = 1, nbytes: int = 60, deadline_s: float = 10.0, priority: int = 0) -> Arrive:
    return Arrive(name, 10, items, nbytes, Turn(priority, deadline_s, next(_arrivals)))


def test_a_request_pulls_then_runs() -> None:
    queue = TextQueue(LIMITS)
    assert queue.handle(arrive("a"), 0.0) == [StartPulls("a")]
    assert (queue.waiting, queue.running, queue.waiting_tokens) == (1, 0, 10)
    assert queue.handle(AllPulled("a"), 0.0) == [StartRun("a")]
    assert (queue.waiting, queue.running, queue.waiting_tokens) == (0, 1, 0)
    assert queue.handle(Leave("a"), 0.0) == []
    assert "a" not in queue


def test_text_alone_runs_at_once_if_there_is_room_and_the_most_urgent_is_next() -> None:
    queue = TextQueue(LIMITS)
    for name in ("a", "b"):
        assert queue.handle(arrive(name, items=0, nbytes=0), 0.0) == [StartRun(name)]
    assert queue.handle(arrive("patient", items=0, nbytes=0, deadline_s=30.0), 0.0) == []
    assert queue.handle(arrive("urgent", items=0, nbytes=0, deadline_s=3.0), 0.0) == []
    assert queue.handle(Leave("a"), 0.0) == [StartRun("urgent")]


def test_a_lower_priority_overtakes_who_waits_to_pull_and_to_run_but_not_who_runs() -> None:
    queue = TextQueue(LIMITS)
    for name in ("a", "b"):
        assert queue.handle(arrive(name, items=0, nbytes=0), 0.0) == [StartRun(name)]
    assert queue.handle(arrive("pulling"), 0.0) == [StartPulls("pulling")]
    assert queue.handle(arrive("urgent", deadline_s=1.0), 0.0) == []
    assert queue.handle(arrive("first", deadline_s=50.0, priority=-1), 0.0) == []
    assert queue.handle(AllPulled("pulling"), 0.0) == [StartPulls("first")]
    assert queue.handle(AllPulled("first"), 0.0) == [StartPulls("urgent")]
    assert queue.handle(Leave("a"), 0.0) == [StartRun("first")]
    assert queue.handle(Leave("b"), 0.0) == [StartRun("pulling")]


def test_bytes_on_their_way_are_bounded_and_a_large_request_is_not_overtaken() -> None:
    queue = TextQueue(LIMITS)
    assert queue.handle(arrive("a", nbytes=60), 0.0) == [StartPulls("a")]
    assert queue.handle(arrive("large", nbytes=500), 0.0) == []
    assert queue.handle(arrive("small", nbytes=10), 0.0) == []
    assert queue.handle(AllPulled("a"), 0.0) == [StartRun("a"), StartPulls("large")]
    assert queue.handle(Leave("large"), 0.0) == [StartPulls("small")]


def test_what_fills_a_bound_to_its_last_byte_is_within_it() -> None:
    queue = TextQueue(
        QueueLimits(max_waiting=9, max_running=3, max_pulling_requests_nbytes=100, max_running_nbytes=100)
    )
    assert queue.handle(arrive("a", nbytes=60), 0.0) == [StartPulls("a")]
    assert queue.handle(arrive("b", nbytes=40), 0.0) == [StartPulls("b")]
    assert queue.handle(AllPulled("a"), 0.0) == [StartRun("a")]
    assert queue.handle(AllPulled("b"), 0.0) == [StartRun("b")]


def test_a_full_queue_refuses_and_so_does_it_a_second_request_of_one_id() -> None:
    queue = TextQueue(LIMITS)
    assert isinstance([queue.handle(arrive("a"), 0.0), queue.handle(arrive("a"), 0.0)][1][0], Refuse)
    for name in "bcd":
        queue.handle(arrive(name), 0.0)
    [refused] = queue.handle(arrive("e"), 0.0)
    assert isinstance(refused, Refuse)
    assert "4 requests" in refused.reason


def test_events_of_a_request_that_has_left_change_nothing() -> None:
    queue = TextQueue(LIMITS)
    queue.handle(arrive("a"), 0.0)
    queue.handle(Leave("a"), 0.0)
    assert queue.handle(AllPulled("a"), 0.0) == []
    assert queue.handle(Leave("a"), 0.0) == []


class AnyOrder(RuleBasedStateMachine):
    """Nobody gets a turn twice, and once others have left, everybody who stays gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = TextQueue(LIMITS)
        self.number = 0
        self.here: dict[str, str] = {}

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartPulls(name):
                    assert self.here[name] == "queued"
                    self.here[name] = "pulling"
                case StartRun(name):
                    assert self.here[name] == "pulled"
                    self.here[name] = "running"

    @rule(items=st.integers(0, 2), nbytes=st.integers(1, 150), deadline_s=st.integers(0, 50))
    def arrive(self, items: int, nbytes: int, deadline_s: int) -> None:
        self.number += 1
        name = f"r{self.number}"
        waiting = sum(phase != "running" for phase in self.here.values())
        self.here[name] = "queued" if items else "pulled"
        effects = self.queue.handle(arrive(name, items=items, nbytes=nbytes * items, deadline_s=deadline_s), 0.0)
        if any(isinstance(effect, Refuse) for effect in effects):
            assert waiting >= LIMITS.max_waiting
            del self.here[name]
        else:
            self.note(effects)

    @rule(data=st.data())
    def pulled(self, data: st.DataObject) -> None:
        pulling = sorted(name for name, phase in self.here.items() if phase == "pulling")
        if pulling:
            name = data.draw(st.sampled_from(pulling))
            self.here[name] = "pulled"
            self.note(self.queue.handle(AllPulled(name), 0.0))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.here:
            name = data.draw(st.sampled_from(sorted(self.here)))
            del self.here[name]
            self.note(self.queue.handle(Leave(name), 0.0))

    @invariant()
    def consistent(self) -> None:
        self.queue.validate()
        phases = list(self.here.values())
        assert self.queue.running == phases.count("running")
        assert self.queue.waiting == len(phases) - phases.count("running")
        assert "queued" not in phases or "pulling" in phases, "somebody waits although nothing is being pulled"


TestAnyOrder = AnyOrder.TestCase


def test_running_requests_hold_no_more_bytes_than_fit_and_a_large_one_runs_alone() -> None:
    queue = TextQueue(
        QueueLimits(max_waiting=9, max_running=3, max_pulling_requests_nbytes=1000, max_running_nbytes=100)
    )

    def arrive(name: str, nbytes: int, deadline_s: float) -> list[object]:
        effects: list[object] = [*queue.handle(Arrive(name, 1, 1, nbytes, Turn(0, deadline_s, 0)), 0.0)]
        effects += queue.handle(AllPulled(name), 0.0)
        queue.validate()
        return effects

    assert StartRun("a") in arrive("a", 60, 1.0)
    assert StartRun("b") not in arrive("b", 60, 2.0)
    assert StartRun("c") not in arrive("c", 10, 3.0)  # nobody overtakes
    assert queue.handle(Leave("a"), 0.0) == [StartRun("b"), StartRun("c")]
    assert StartRun("large") not in arrive("large", 200, 4.0)
    queue.handle(Leave("b"), 0.0)
    assert queue.handle(Leave("c"), 0.0) == [StartRun("large")]
    queue.validate()
