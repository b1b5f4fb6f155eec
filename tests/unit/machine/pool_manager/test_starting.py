"""The instances of a pool: what has registered, what starts, what died, and what failed to start."""

from triptych.domain.decision import InstancePhase, PoolInstance
from triptych.domain.scaling import ProcessPhase, ScaledInstance
from triptych.machine.pool_manager.starting import StartingInstances

READY, STARTING = InstancePhase.READY, InstancePhase.STARTING


class Pool:
    """What the scaler says, and which members are registered since when."""

    def __init__(self) -> None:
        self.starting = StartingInstances()
        self.members: dict[str, tuple[InstancePhase, float]] = {}
        self.failures: list[str] = []

    def look(self, at_s: float, *scaled: tuple[str, ProcessPhase, str]) -> dict[str, tuple[InstancePhase, float]]:
        members = tuple(
            PoolInstance(name, phase, age_s=at_s - since_s) for name, (phase, since_s) in self.members.items()
        )
        seen = self.starting.observe(members, [ScaledInstance(*fields) for fields in scaled], at_s)
        self.failures += seen.failures
        return {instance.instance_id: (instance.phase, instance.age_s) for instance in seen.instances}


def test_what_is_ordered_or_starts_or_has_not_registered_yet_is_starting_since_it_was_seen_first() -> None:
    pool = Pool()
    pool.members["a"] = (READY, 0.0)
    now = pool.look(10.0, ("a", ProcessPhase.RUNNING, ""), ("b", ProcessPhase.ORDERED, ""))
    assert now == {"a": (READY, 10.0), "b": (STARTING, 0.0)}
    assert pool.look(15.0, ("a", ProcessPhase.RUNNING, ""), ("b", ProcessPhase.STARTING, ""))["b"] == (STARTING, 5.0)
    assert pool.look(17.0, ("a", ProcessPhase.RUNNING, ""), ("b", ProcessPhase.RUNNING, ""))["b"] == (STARTING, 7.0)
    pool.members["b"] = (READY, 18.0)
    assert pool.look(18.0, ("a", ProcessPhase.RUNNING, ""), ("b", ProcessPhase.RUNNING, ""))["b"] == (READY, 0.0)
    assert pool.look(19.0)["a"] == (READY, 19.0), "the scaler need not know every member"
    assert pool.failures == []


def test_a_process_that_runs_and_does_not_register_is_lost_after_a_while_and_back_when_it_does() -> None:
    pool = Pool()
    pool.members["a"] = (READY, 0.0)
    pool.look(10.0, ("a", ProcessPhase.RUNNING, ""))
    pool.members.clear()
    assert pool.look(20.0, ("a", ProcessPhase.RUNNING, ""))["a"][0] is STARTING
    assert pool.look(49.0, ("a", ProcessPhase.RUNNING, ""))["a"][0] is STARTING
    assert pool.look(50.0, ("a", ProcessPhase.RUNNING, ""))["a"] == (InstancePhase.LOST, 30.0)
    pool.members["a"] = (READY, 51.0)
    assert pool.look(51.0, ("a", ProcessPhase.RUNNING, ""))["a"] == (READY, 0.0)


def test_a_process_that_never_registers_does_not_count_for_ever() -> None:
    pool = Pool()
    assert pool.look(0.0, ("a", ProcessPhase.RUNNING, ""))["a"][0] is STARTING
    assert pool.look(29.0, ("a", ProcessPhase.RUNNING, ""))["a"][0] is STARTING
    assert pool.look(30.0, ("a", ProcessPhase.RUNNING, "")) == {}, "perhaps it works under another name: it is not lost"


def test_instances_that_have_other_names_than_the_scaler_gives_them_are_not_counted_twice() -> None:
    pool = Pool()
    pool.members.update(x=(READY, 0.0), y=(READY, 0.0))
    now = pool.look(5.0, *((name, ProcessPhase.RUNNING, "") for name in "abc"), ("d", ProcessPhase.STARTING, ""))
    assert {name: phase for name, (phase, _) in now.items()} == {"x": READY, "y": READY, "c": STARTING, "d": STARTING}


def test_a_member_whose_process_died_is_starting_until_it_registers_again_and_that_is_no_failed_start() -> None:
    pool = Pool()
    pool.members["a"] = (READY, 0.0)
    pool.look(10.0, ("a", ProcessPhase.RUNNING, ""))
    assert pool.look(11.0, ("a", ProcessPhase.ORDERED, "killed"))["a"] == (STARTING, 0.0)
    assert pool.look(13.0, ("a", ProcessPhase.STARTING, ""))["a"] == (STARTING, 2.0), (
        "its old registration says nothing"
    )
    pool.members["a"] = (READY, 14.0)
    assert pool.look(15.0, ("a", ProcessPhase.RUNNING, ""))["a"] == (READY, 1.0)
    assert pool.failures == []


def test_a_member_that_died_and_starts_again_between_two_looks_is_starting() -> None:
    pool = Pool()
    pool.members["a"] = (READY, 0.0)
    pool.look(10.0, ("a", ProcessPhase.RUNNING, ""))
    assert pool.look(12.0, ("a", ProcessPhase.STARTING, ""))["a"][0] is STARTING, "its old registration is still listed"
    pool.members["a"] = (READY, 14.0)
    assert pool.look(15.0, ("a", ProcessPhase.RUNNING, ""))["a"] == (READY, 1.0)
    assert pool.failures == []


def test_each_failed_start_is_noticed_once() -> None:
    pool = Pool()
    pool.look(0.0, ("a", ProcessPhase.STARTING, ""))
    for at_s in (1.0, 2.0, 3.0):
        pool.look(at_s, ("a", ProcessPhase.ORDERED, "exit status 1"))
    assert pool.failures == ["a: exit status 1"]
    pool.look(4.0, ("a", ProcessPhase.STARTING, "exit status 1"))
    pool.look(5.0, ("a", ProcessPhase.ORDERED, "exit status 1"))
    pool.look(6.0, ("a", ProcessPhase.FAILED, "exit status 1"))
    assert len(pool.failures) == 3
    assert "a" not in pool.look(7.0, ("a", ProcessPhase.FAILED, "exit status 1")), "nothing starts there"


def test_crashes_between_two_looks_are_noticed_by_another_reason() -> None:
    pool = Pool()
    pool.members["a"] = (READY, 0.0)
    pool.look(1.0, ("a", ProcessPhase.RUNNING, ""))
    pool.members.clear()
    pool.look(2.0, ("a", ProcessPhase.ORDERED, "killed"))
    pool.look(3.0, ("a", ProcessPhase.ORDERED, "exit status 1 while starting"))
    assert pool.failures == ["a: exit status 1 while starting"]


def test_an_instance_that_stays_failed_counts_again_and_again_slowly() -> None:
    pool = Pool()
    for at_s in range(31):
        pool.look(float(at_s), ("a", ProcessPhase.FAILED, ""))
    assert pool.failures == ["a: it failed"] * 4


def test_a_member_that_is_being_stopped_drains() -> None:
    pool = Pool()
    pool.members["a"] = (READY, 0.0)
    pool.members["b"] = (InstancePhase.DRAINED, 0.0)
    now = pool.look(
        5.0, ("a", ProcessPhase.STOPPING, ""), ("b", ProcessPhase.STOPPING, ""), ("c", ProcessPhase.STOPPING, "")
    )
    assert {name: phase for name, (phase, _) in now.items()} == {
        "a": InstancePhase.DRAINING,
        "b": InstancePhase.DRAINED,
    }
