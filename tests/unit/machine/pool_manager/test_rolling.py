"""Pools that change their tensor-parallel degree: one instance after the other, and none before its successor serves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from triptych.domain.decision import InstancePhase, PoolInstance
from triptych.machine.pool_manager.rolling import DrainForDegree, RollEnded, RollMachine, RollOutcome

PATIENCE_S = 30.0


class Pool:
    """Instances whose process is replaced when they have drained, as a scaler does."""

    def __init__(self, size: int) -> None:
        self.instances = {f"old{number}": PoolInstance(f"old{number}", InstancePhase.READY) for number in range(size)}
        self.degrees = dict.fromkeys(self.instances, 1)
        self.roll = RollMachine(2, 1, size, patience_s=PATIENCE_S, now_s=0.0)
        self.now_s = 0.0
        self.drained: list[str] = []
        self.ends: list[RollEnded] = []
        self.started = 0

    @property
    def ready(self) -> int:
        return sum(instance.phase is InstancePhase.READY for instance in self.instances.values())

    def tick(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        for effect in self.roll.handle(tuple(self.instances.values()), self.degrees, self.now_s):
            match effect:
                case DrainForDegree(name, _):
                    self.drained.append(name)
                    self.phase(name, InstancePhase.DRAINING)
                case RollEnded():
                    self.ends.append(effect)

    def phase(self, name: str, phase: InstancePhase) -> None:
        self.instances[name] = PoolInstance(name, phase, running=self.instances[name].running)

    def start(self) -> str:
        self.started += 1
        name = f"new{self.started}"
        self.instances[name] = PoolInstance(name, InstancePhase.READY)
        self.degrees[name] = 2
        return name

    def leave(self, name: str) -> None:
        del self.instances[name], self.degrees[name]


def test_one_starts_then_one_drains_until_all_have_the_new_degree() -> None:
    pool = Pool(3)
    for number in range(3):
        assert pool.roll.wanted == 4
        pool.tick()
        assert len(pool.drained) == number, "its successor does not serve yet"
        pool.start()
        pool.tick()
        assert len(pool.drained) == number + 1
        pool.tick()
        assert len(pool.drained) == number + 1, "one at a time"
        pool.leave(pool.drained[-1])
    assert pool.roll.wanted == 3, "the last one is not replaced"
    pool.tick()
    assert pool.ends == [RollEnded(RollOutcome.DONE, "all 3 instances have degree 2")]


def test_the_instance_with_the_least_to_finish_drains_first() -> None:
    pool = Pool(2)
    pool.instances["old0"] = PoolInstance("old0", InstancePhase.READY, running=5)
    pool.start()
    pool.tick()
    assert pool.drained == ["old1"]


def test_what_does_not_start_ends_the_roll_and_drains_nothing() -> None:
    pool = Pool(2)
    pool.tick()
    pool.roll.failed("no device is free")
    pool.tick()
    assert pool.ends == [RollEnded(RollOutcome.ABORTED, "an instance with degree 2 did not start: no device is free")]
    assert pool.drained == []


def test_what_is_not_ready_in_time_ends_the_roll() -> None:
    pool = Pool(2)
    pool.start()
    pool.tick()
    pool.leave("old0")
    pool.tick(PATIENCE_S - 2)
    assert pool.ends == []
    pool.tick(2)
    assert pool.ends == [RollEnded(RollOutcome.ABORTED, "no instance with degree 2 was ready within 30 s")]
    assert pool.ready == 2


@pytest.mark.parametrize("wait_s", [PATIENCE_S, 10 * PATIENCE_S])
def test_a_long_drain_is_waited_for(wait_s: float) -> None:
    pool = Pool(1)
    pool.start()
    pool.tick()
    pool.tick(wait_s)
    assert pool.ends == []
    pool.leave("old0")
    pool.tick()
    assert [end.outcome for end in pool.ends] == [RollOutcome.DONE]


def test_it_says_how_far_it_has_come() -> None:
    pool = Pool(2)
    pool.start()
    pool.tick()
    assert str(pool.roll) == "rolls from tensor-parallel degree 1 to 2: 1 of 2 instances were replaced"


@given(size=st.integers(1, 6), delays=st.lists(st.integers(1, 5), min_size=20, max_size=20))
@settings(max_examples=examples(50))
def test_there_are_never_fewer_than_before(size: int, delays: list[int]) -> None:
    """Starts and drains take any time: as many serve as before, and one more at most."""
    pool, waits = Pool(size), iter(delays * 20)
    starting, draining = next(waits), 0
    for _ in range(400):
        pool.tick()
        assert pool.ready >= size
        if pool.ends:
            break
        leaving = [name for name, instance in pool.instances.items() if instance.phase is InstancePhase.DRAINING]
        if leaving and draining == 0:
            draining = next(waits)
        elif leaving:
            draining -= 1
            if draining == 0:
                pool.leave(leaving[0])
        if len(pool.instances) < pool.roll.wanted:
            starting -= 1
            if starting <= 0:
                pool.start()
                starting = next(waits)
    assert [end.outcome for end in pool.ends] == [RollOutcome.DONE]
    assert set(pool.degrees.values()) == {2}
    assert len(pool.instances) == size
