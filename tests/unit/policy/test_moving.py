"""The way from one placement to another, step by step, against a cluster that does what is ordered."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.stage import Role, Stage
from triptych.policy.moving import Placed, PoolSize, Steps, next_steps

ALL = frozenset(Stage)
NONE: frozenset[Stage] = frozenset()


@dataclass
class Cluster:
    """Instances that switch at once, start at the next step, and end when they are drained."""

    instances: dict[str, tuple[Role, Role]]
    """Pool and role by name."""
    pools: dict[Role, PoolSize]
    switchable: frozenset[Stage] = ALL

    @classmethod
    def of(cls, sizes: dict[Role, int], most: int = 16, switchable: frozenset[Stage] = ALL) -> "Cluster":
        instances = {f"{role.value}{number}": (role, role) for role, count in sizes.items() for number in range(count)}
        return cls(instances, {role: PoolSize(count, 1, most) for role, count in sizes.items()}, switchable)

    def placed(self) -> list[Placed]:
        return [Placed(name, pool, role, True, self.switchable) for name, (pool, role) in self.instances.items()]

    def roles(self) -> Counter[Role]:
        return Counter(role for _, role in self.instances.values())

    def serving(self) -> Counter[Stage]:
        return Counter(stage for _, role in self.instances.values() for stage in role.stages)

    def step(self, wanted: dict[Role, int]) -> Steps:
        for role, size in self.pools.items():
            for number in range(size.wanted - sum(pool is role for pool, _ in self.instances.values())):
                self.instances[f"{role.value}{len(self.instances)}-{number}-new"] = role, role
        steps = next_steps(wanted, self.placed(), self.pools)
        for name, role in steps.switches:
            self.instances[name] = self.instances[name][0], role
        for role, wanted_size in (steps.sizes or {}).items():
            self.pools[role] = PoolSize(wanted_size, self.pools[role].least, self.pools[role].most)
        if steps.drain:
            del self.instances[steps.drain]
        return steps

    def move(self, wanted: dict[Role, int]) -> Counter[Role]:
        """Where it ends. Every stage is served meanwhile."""
        for _ in range(100):
            steps = self.step(wanted)
            assert min(self.serving()[stage] for stage in Stage) >= 1
            if steps.is_done:
                return self.roles()
        raise AssertionError(f"it does not end: {self.roles()} on the way to {wanted}")


def test_instances_switch_where_as_many_are_wanted() -> None:
    cluster = Cluster.of({Role.E: 2, Role.P: 1, Role.D: 3})
    steps = cluster.step({Role.E: 3, Role.P: 2, Role.D: 1})
    assert sorted(role.value for _, role in steps.switches) == ["E", "P"]
    assert not steps.drain
    assert steps.sizes == {Role.E: 2, Role.P: 1, Role.D: 3}
    assert cluster.step({Role.E: 3, Role.P: 2, Role.D: 1}).is_done


def test_an_instance_with_less_to_finish_switches_first() -> None:
    placed = [
        Placed("busy", Role.D, Role.D, True, ALL, pending=9),
        Placed("idle", Role.D, Role.D, True, ALL),
        Placed("prefills", Role.P, Role.P, True, ALL),
        Placed("encodes", Role.E, Role.E, True, ALL),
    ]
    assert next_steps({Role.E: 2, Role.P: 1, Role.D: 1}, placed, {}).switches == (("idle", Role.E),)


def test_the_last_instance_of_a_stage_does_not_switch() -> None:
    cluster = Cluster.of({Role.E: 1, Role.PD: 1})
    assert cluster.step({Role.EPD: 2}).switches
    assert Cluster.of({Role.E: 1, Role.PD: 2}).move({Role.E: 2, Role.PD: 1}) == {Role.E: 2, Role.PD: 1}


def test_pools_grow_and_shrink_where_nothing_can_switch() -> None:
    cluster = Cluster.of({Role.E: 2, Role.PD: 4}, switchable=NONE)
    assert cluster.move({Role.E: 5, Role.PD: 2}) == {Role.E: 5, Role.PD: 2}


def test_the_whole_model_is_divided_by_switching_the_instances_that_are_there() -> None:
    cluster = Cluster.of({Role.EPD: 4})
    before = set(cluster.instances)
    assert cluster.move({Role.E: 2, Role.PD: 2}) == {Role.E: 2, Role.PD: 2}
    assert set(cluster.instances) == before, "none was restarted"


def test_a_larger_placement_starts_what_is_lacking_and_a_smaller_one_ends_it_again() -> None:
    cluster = Cluster.of({Role.EPD: 2})
    assert cluster.move({Role.E: 4, Role.PD: 3}) == {Role.E: 4, Role.PD: 3}
    assert cluster.move({Role.EPD: 2}) == {Role.EPD: 2}


def test_without_a_scaler_instances_that_are_too_many_stay() -> None:
    placed = [Placed(f"t{number}", Role.EPD, Role.EPD, True, ALL) for number in range(4)]
    steps = next_steps({Role.EPD: 2}, placed, {})
    assert steps.sizes is None
    assert steps.is_done


def test_a_bound_stops_the_growth() -> None:
    cluster = Cluster.of({Role.EPD: 2}, most=3)
    assert cluster.move({Role.EPD: 6}) == {Role.EPD: 3}


PLACEMENTS = (
    [{Role.EPD: count} for count in (1, 2, 5)]
    + [{Role.E: encoders, Role.PD: texts} for encoders in (1, 3) for texts in (1, 4)]
    + [{Role.E: encoders, Role.P: 1, Role.D: decoders} for encoders in (1, 2) for decoders in (1, 3)]
    + [{Role.EP: 2, Role.D: 2}, {Role.P: 1, Role.ED: 3}, {Role.E: 1, Role.EPD: 2}]
)


@given(st.sampled_from(PLACEMENTS), st.lists(st.sampled_from(PLACEMENTS), min_size=1, max_size=4))
def test_any_placement_is_reached_from_any_other_and_every_stage_is_served_meanwhile(
    first: dict[Role, int], others: list[dict[Role, int]]
) -> None:
    cluster = Cluster.of(first)
    for wanted in others:
        reached = cluster.move(wanted)
        least = len(first)  # each pool keeps one instance
        assert sum(reached.values()) == max(least, sum(wanted.values()))
        assert all(reached[role] >= count for role, count in wanted.items())
