from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from triptych.domain.scaling import ProcessPhase
from triptych.errors import Deposed, InvalidRequest, NotFound
from triptych.machine.process_pool_events import (
    Adopt,
    Effect,
    Event,
    GaveUp,
    KillProcess,
    ProcessAnswered,
    ProcessEnded,
    ProcessReady,
    Remove,
    SetSize,
    StartProcess,
    StopProcess,
    TimePassed,
)
from triptych.machine.process_pools import ProcessPools, RestartRules

RULES = RestartRules(
    first_backoff_s=1,
    longest_backoff_s=8,
    stable_s=60,
    start_crashes=3,
    start_timeout_s=100,
    grace_s=30,
    max_processes=8,
)


class Pools:
    """The machine with a clock, validated after each event."""

    def __init__(self) -> None:
        self.machine = ProcessPools({"encoder": "encoder-{}", "router": "router"}, RULES)
        self.now_s = 0.0

    def __call__(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now_s)
        self.machine.validate()
        return effects

    def scale(self, size: int, token: int = 1, pool: str = "encoder") -> list[Effect]:
        return self(SetSize(pool, size, token))

    def later(self, seconds: float) -> list[Effect]:
        self.now_s += seconds
        return self(TimePassed())

    def run(self, size: int) -> None:
        for effect in self.scale(size):
            assert isinstance(effect, StartProcess)
            self(ProcessReady(effect.process))

    def end(self, process: str, reason: str = "it was killed") -> list[Effect]:
        return self(ProcessEnded(process, reason))

    @property
    def phases(self) -> dict[str, ProcessPhase]:
        return {process.name: process.phase for process in self.machine.processes("encoder")}

    @property
    def fault(self) -> str:
        return self.machine.fault("encoder")


def started(effects: list[Effect]) -> list[str]:
    return [effect.process for effect in effects if isinstance(effect, StartProcess)]


def test_a_size_starts_as_many_processes_and_a_larger_one_the_rest() -> None:
    pools = Pools()
    assert started(pools.scale(2)) == ["encoder-1", "encoder-2"]
    assert started(pools.scale(2)) == []
    assert started(pools.scale(3)) == ["encoder-3"]
    assert set(pools.phases.values()) == {ProcessPhase.STARTING}
    pools(ProcessReady("encoder-2"))
    assert pools.phases["encoder-2"] is ProcessPhase.RUNNING


def test_a_smaller_size_stops_the_newest_that_start_and_nothing_that_runs() -> None:
    pools = Pools()
    pools.run(2)
    pools.scale(4)
    assert pools.scale(1) == [StopProcess("encoder-4", "1 wanted"), StopProcess("encoder-3", "1 wanted")]
    assert pools.phases["encoder-1"] is pools.phases["encoder-2"] is ProcessPhase.RUNNING
    assert pools(Remove("encoder", "encoder-1", 1)) == [StopProcess("encoder-1", "removed")]
    assert pools.end("encoder-1") == []
    assert "encoder-1" not in pools.phases


def test_a_removed_process_is_replaced_if_the_size_still_wants_it() -> None:
    pools = Pools()
    pools.run(2)
    effects = pools(Remove("encoder", "encoder-1", 1))
    assert effects == [StopProcess("encoder-1", "removed"), StartProcess("encoder", "encoder-3", "2 wanted")]
    assert pools(Remove("encoder", "encoder-1", 1)) == [], "it ends already"


def test_a_newer_size_replaces_an_older_one_that_is_being_carried_out() -> None:
    pools = Pools()
    pools.scale(4)
    pools.scale(0)
    for process in ("encoder-1", "encoder-2", "encoder-3", "encoder-4"):
        assert pools.phases[process] is ProcessPhase.STOPPING
    assert started(pools.scale(1)) == ["encoder-5"]


def test_a_process_that_died_is_started_again_under_its_name_after_pauses_that_double() -> None:
    pools = Pools()
    pools.run(1)
    for pause_s in (1, 2, 4, 8, 8):
        assert pools.end("encoder-1") == []
        assert pools.phases == {"encoder-1": ProcessPhase.ORDERED}
        assert pools.machine.due_s == pools.now_s + pause_s
        assert pools.later(pause_s - 0.01) == []
        assert pools.later(0.01) == [StartProcess("encoder", "encoder-1", "again: it was killed")]
        pools(ProcessReady("encoder-1"))
    pools.later(60)
    pools.end("encoder-1")
    assert pools.machine.due_s == pools.now_s + 1, "it was stable"


def test_a_process_that_died_is_not_started_again_when_fewer_are_wanted() -> None:
    pools = Pools()
    pools.run(2)
    pools.scale(1)
    pools.end("encoder-1")
    assert pools.phases == {"encoder-2": ProcessPhase.RUNNING}


@pytest.mark.parametrize("size", [2, 3])
def test_three_crashes_at_the_start_give_the_pool_up_until_a_size_is_declared(size: int) -> None:
    pools = Pools()
    pools.scale(2)
    pools.end("encoder-1", "it ended with status 1")
    pools.end("encoder-2", "it ended with status 1")
    pools.later(1)
    reason = "gave up after 3 crashes at the start: it ended with status 1 while starting"
    assert pools.end("encoder-1", "it ended with status 1") == [GaveUp("encoder", reason)]
    assert pools.fault == reason
    assert pools.phases["encoder-1"] is ProcessPhase.FAILED
    pools.end("encoder-2")
    assert set(pools.phases.values()) == {ProcessPhase.FAILED}
    assert pools.later(1000) == []
    assert started(pools.scale(size)) == [f"encoder-{number}" for number in range(1, size + 1)]
    assert pools.fault == ""


def test_a_size_that_is_declared_again_does_not_hurry_what_waits_for_its_next_attempt() -> None:
    pools = Pools()
    pools.scale(1)
    pools.end("encoder-1")
    assert pools.scale(1) == []
    assert started(pools.later(1)) == ["encoder-1"]


def test_crashes_are_counted_in_a_row() -> None:
    pools = Pools()
    pools.scale(2)
    for _ in range(5):
        pools.end("encoder-1")
        pools.later(10)
        pools(ProcessReady("encoder-2"))
        pools.end("encoder-2")
        pools.later(10)
    assert pools.fault == ""


def test_a_pool_that_gave_up_still_replaces_what_ran() -> None:
    pools = Pools()
    pools.run(1)
    pools.scale(2)
    for _ in range(3):
        pools.end("encoder-2")
        pools.later(10)
    assert pools.fault
    assert pools.phases == {"encoder-1": ProcessPhase.RUNNING, "encoder-2": ProcessPhase.FAILED}
    pools.later(100)
    pools.end("encoder-1")
    assert started(pools.later(1)) == ["encoder-1"]
    pools(ProcessReady("encoder-1"))
    assert pools.fault == ""


def test_a_process_that_does_not_get_ready_is_killed_and_counts_as_crashed() -> None:
    pools = Pools()
    pools.scale(1)
    for number in range(3):
        assert pools.later(99) == []
        assert pools.later(1) == [KillProcess("encoder-1", "not ready after 100 s")]
        assert pools.later(1) == [], "once"
        pools.end("encoder-1")
        assert bool(pools.fault) == (number == 2)
        pools.later(8)
    assert "not ready after 100 s: it was killed" in pools.fault


def test_a_process_that_does_not_end_is_killed_after_the_grace_time_and_not_before() -> None:
    pools = Pools()
    pools.run(1)
    pools.scale(0)
    pools(Remove("encoder", "encoder-1", 1))
    assert pools.later(29.9) == []
    assert pools.later(0.1) == [KillProcess("encoder-1", "not ended after 30 s")]
    pools.end("encoder-1")
    assert pools.phases == {}
    assert pools.machine.due_s is None


def test_an_order_with_an_older_token_is_refused_for_every_pool() -> None:
    pools = Pools()
    pools.scale(1, token=5)
    with pytest.raises(Deposed, match="token is 4, a later leader has 5"):
        pools.scale(2, token=4)
    with pytest.raises(Deposed):
        pools.scale(1, token=4, pool="router")
    with pytest.raises(Deposed):
        pools(Remove("encoder", "encoder-1", 4))
    assert pools.phases == {"encoder-1": ProcessPhase.STARTING}
    assert started(pools.scale(2, token=5)) == ["encoder-2"]


def test_orders_that_cannot_be_carried_out_are_refused_and_change_nothing() -> None:
    pools = Pools()
    for size in (-1, 9):
        with pytest.raises(InvalidRequest, match="must be 0 to 8"):
            pools.scale(size, token=9)
    with pytest.raises(InvalidRequest, match="must be 0 to 1"):
        pools.scale(2, pool="router", token=9)
    with pytest.raises(NotFound):
        pools.scale(1, pool="text", token=9)
    with pytest.raises(NotFound):
        pools(Remove("encoder", "encoder-1", 9))
    pools.scale(1, token=1)


def test_processes_that_run_already_are_adopted() -> None:
    pools = Pools()
    pools(Adopt("encoder", ("encoder-1", "encoder-2")))
    pools(Adopt("router", ("router",)))
    assert pools.machine.wanted("encoder") == 2
    pools.end("encoder-2")
    pools.end("router")
    assert started(pools.later(1)) == ["encoder-2", "router"]
    assert started(pools.scale(3)) == ["encoder-3"]


EVENTS = st.one_of(
    st.builds(SetSize, st.just("encoder"), st.integers(0, 8), st.integers(1, 3)),
    st.builds(Remove, st.just("encoder"), st.integers(1, 12).map("encoder-{}".format), st.integers(1, 3)),
    st.builds(ProcessReady, st.integers(1, 12).map("encoder-{}".format)),
    st.builds(ProcessEnded, st.integers(1, 12).map("encoder-{}".format), st.just("it was killed")),
    st.just(TimePassed()),
)


class World:
    """Processes that exist, as the machine asked."""

    def __init__(self) -> None:
        self.pools = Pools()
        self.alive: set[str] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, ProcessReady | ProcessEnded) and event.process not in self.alive:
            return  # only what was started is reported on
        if isinstance(event, ProcessEnded):
            self.alive.discard(event.process)
        try:
            effects = self.pools(event)
        except (Deposed, NotFound):
            return
        for effect in effects:
            match effect:
                case StartProcess():
                    assert effect.process not in self.alive, "started twice"
                    self.alive.add(effect.process)
                case StopProcess() | KillProcess():
                    assert effect.process in self.alive

    def settle(self) -> None:
        """Make ready what starts, and end what is stopped."""
        for process, phase in self.pools.phases.items():
            if process in self.alive and phase is ProcessPhase.STARTING:
                self(ProcessReady(process))
            elif process in self.alive and phase is ProcessPhase.STOPPING:
                self(ProcessEnded(process, "as asked"))
        self.pools.now_s += 10
        self(TimePassed())


@given(st.lists(st.tuples(EVENTS, st.floats(0, 200)), max_size=60))
def test_whatever_happens_the_pool_becomes_what_is_wanted_once_processes_start(
    history: list[tuple[Event, float]],
) -> None:
    world = World()
    for event, pause_s in history:
        world.pools.now_s += pause_s
        world(event)
    size = 1 + (world.pools.machine.wanted("encoder") or 0) % 8
    world(SetSize("encoder", size, 3))
    for _ in range(60):
        world.settle()
    running = [process for process, phase in world.pools.phases.items() if phase is ProcessPhase.RUNNING]
    assert len(running) == len(world.pools.phases)
    assert len(running) >= size, "what runs is not stopped without a name"


def ended_again_and_again(pools: Pools, name: str, times: int) -> list[Effect]:
    """End a process soon after each start."""
    effects: list[Effect] = []
    for _ in range(times):
        effects = pools.end(name)
        if started(pools.later(RULES.longest_backoff_s)) == [name]:
            pools(ProcessReady(name))
    return effects


def test_a_process_that_ends_again_and_again_without_an_answer_is_given_up_and_the_others_go_on() -> None:
    pools = Pools()
    pools.run(2)
    (effect,) = ended_again_and_again(pools, "encoder-1", RULES.most_ends)
    assert effect == GaveUp("encoder", "gave up encoder-1, which ended 6 times without an answer: it was killed")
    assert pools.phases == {"encoder-1": ProcessPhase.FAILED, "encoder-2": ProcessPhase.RUNNING}
    assert pools.fault == effect.reason
    assert started(pools.later(1000)) == []
    pools.end("encoder-2")
    assert started(pools.later(RULES.first_backoff_s)) == ["encoder-2"]
    pools(ProcessReady("encoder-2"))
    assert pools.phases["encoder-1"] is ProcessPhase.FAILED


@pytest.mark.parametrize("succeeds", ["it answers", "it is ready for long"])
def test_a_process_that_has_success_between_its_ends_is_started_again_soon(succeeds: str) -> None:
    pools = Pools()
    pools.run(2)
    for _ in range(2 * RULES.most_ends):
        pools.end("encoder-1")
        assert started(pools.later(RULES.first_backoff_s)) == ["encoder-1"]
        pools(ProcessReady("encoder-1"))
        assert list(pools.machine.on_trial) == ["encoder-1"]
        if succeeds == "it answers":
            pools(ProcessAnswered("encoder-1"))
            assert not pools.machine.on_trial
        else:
            pools.now_s += RULES.stable_s


def test_whoever_declares_a_size_of_which_a_process_was_given_up_wants_another_attempt() -> None:
    pools = Pools()
    pools.run(2)
    ended_again_and_again(pools, "encoder-1", RULES.most_ends)
    assert started(pools.scale(2)) == ["encoder-1"]
    assert not pools.fault


def test_sizes_that_follow_the_load_do_not_start_a_process_again_that_was_given_up() -> None:
    pools = Pools()
    pools.run(2)
    for size in (3, 2, 3):
        ended_again_and_again(pools, "encoder-1", 1)
        pools.scale(size)
    ended_again_and_again(pools, "encoder-1", RULES.most_ends - 3)
    assert pools.phases["encoder-1"] is ProcessPhase.FAILED
    assert "encoder-1" not in started(pools.scale(4))
    assert pools.phases["encoder-1"] is ProcessPhase.FAILED


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"first_backoff_s": 0.0}, "first_backoff_s"),
        ({"first_backoff_s": 9.0}, "first_backoff_s"),
        ({"stable_s": 0.0}, "must be positive"),
        ({"start_timeout_s": 0.0}, "must be positive"),
        ({"grace_s": 0.0}, "must be positive"),
        ({"start_crashes": 0}, "at least 1"),
        ({"most_ends": 0}, "at least 1"),
        ({"max_processes": 0}, "at least 1"),
    ],
)
def test_rules_without_sense_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RULES, **rules)
    smallest = RestartRules(1.0, 1.0, stable_s=0.1, start_timeout_s=0.1, grace_s=0.1, start_crashes=1, most_ends=1)
    assert replace(smallest, max_processes=1).max_processes == 1


def test_the_pools_are_due_when_a_process_is_to_be_started_or_killed_and_never_else() -> None:
    pools = Pools()
    due_s = [pools.machine.due_s]
    pools.run(1)
    due_s.append(pools.machine.due_s)
    pools(Remove("encoder", "encoder-1", 1))
    pools(ProcessReady("encoder-2"))
    due_s.append(pools.machine.due_s)
    assert pools.later(RULES.grace_s) == [KillProcess("encoder-1", "not ended after 30 s")]
    assert [*due_s, pools.machine.due_s] == [None, None, RULES.grace_s, None], "in the end it is killed already"


def test_a_process_that_waits_to_be_started_again_can_be_removed() -> None:
    pools = Pools()
    pools.run(1)
    pools.end("encoder-1")
    assert pools(Remove("encoder", "encoder-1", 1)) == [StartProcess("encoder", "encoder-2", "1 wanted")]
    assert pools.phases == {"encoder-2": ProcessPhase.STARTING}
