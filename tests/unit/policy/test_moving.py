"""The way from one placement to another, step by step, against a cluster that does what is ordered."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.replanning import Counts
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role, Stage
from triptych.policy.moving import Placed, PoolSize, Steps, next_steps

ALL = frozenset(Stage)
NONE: frozenset[Stage] = frozenset()


@dataclass
class Cluster:
    """Instances that switch at once, start at the next step, and end when they are drained."""

    instances: dict[str, tuple[Kind, Role]]
    """Pool and role by name."""
    pools: dict[Kind, PoolSize]
    switchable: frozenset[Stage] = ALL
    numbers: Iterator[int] = field(default_factory=count)

    @classmethod
    def of(cls, sizes: Counts, most: int = 16, switchable: frozenset[Stage] = ALL, least: int = 1) -> "Cluster":
        instances = {f"{kind}{number}": (kind, kind.role) for kind, count in sizes.items() for number in range(count)}
        return cls(instances, {kind: PoolSize(count, least, most) for kind, count in sizes.items()}, switchable)

    def placed(self) -> list[Placed]:
        return [Placed(name, pool, role, True, self.switchable) for name, (pool, role) in self.instances.items()]

    def roles(self) -> Counter[Kind]:
        return Counter(Kind(role, pool.tier) for pool, role in self.instances.values())

    def serving(self) -> Counter[Stage]:
        return Counter(stage for _, role in self.instances.values() for stage in role.stages)

    def step(self, wanted: Counts) -> Steps:
        for kind, size in self.pools.items():
            for _ in range(size.wanted - sum(pool == kind for pool, _ in self.instances.values())):
                self.instances[f"{kind}-new{next(self.numbers)}"] = kind, kind.role
        steps = next_steps(wanted, self.placed(), self.pools)
        for name, role in steps.switches:
            self.instances[name] = self.instances[name][0], role
        for kind, wanted_size in (steps.sizes or {}).items():
            self.pools[kind] = PoolSize(wanted_size, self.pools[kind].least, self.pools[kind].most)
        if steps.drain:
            del self.instances[steps.drain]
        return steps

    def move(self, wanted: Counts) -> Counter[Kind]:
        """Where it ends. Every stage is served meanwhile."""
        for _ in range(100):
            steps = self.step(wanted)
            assert min(self.serving()[stage] for stage in Stage) >= 1
            if steps.is_done:
                return self.roles()
        raise AssertionError(f"it does not end: {self.roles()} on the way to {wanted}")


def of(**roles: int) -> dict[Kind, int]:
    return {Kind(Role(letters)): count for letters, count in roles.items()}


def test_instances_switch_where_as_many_are_wanted() -> None:
    cluster = Cluster.of(of(E=2, P=1, D=3))
    steps = cluster.step(of(E=3, P=2, D=1))
    assert sorted(role.value for _, role in steps.switches) == ["E", "P"]
    assert not steps.drain
    assert steps.sizes == of(E=2, P=1, D=3)
    assert cluster.step(of(E=3, P=2, D=1)).is_done


def test_an_instance_with_less_to_finish_switches_first() -> None:
    placed = [
        Placed("busy", Kind(Role.D), Role.D, True, ALL, pending=9),
        Placed("idle", Kind(Role.D), Role.D, True, ALL),
        Placed("prefills", Kind(Role.P), Role.P, True, ALL),
        Placed("encodes", Kind(Role.E), Role.E, True, ALL),
    ]
    assert next_steps(of(E=2, P=1, D=1), placed, {}).switches == (("idle", Role.E),)


def test_the_last_instance_of_a_stage_does_not_switch() -> None:
    cluster = Cluster.of(of(E=1, PD=1))
    assert cluster.step(of(EPD=2)).switches
    assert Cluster.of(of(E=1, PD=2)).move(of(E=2, PD=1)) == of(E=2, PD=1)


def test_pools_grow_and_shrink_where_nothing_can_switch() -> None:
    cluster = Cluster.of(of(E=2, PD=4), switchable=NONE)
    assert cluster.move(of(E=5, PD=2)) == of(E=5, PD=2)


def test_the_whole_model_is_divided_by_switching_the_instances_that_are_there() -> None:
    cluster = Cluster.of(of(EPD=4))
    before = set(cluster.instances)
    assert cluster.move(of(E=2, PD=2)) == of(E=2, PD=2)
    assert set(cluster.instances) == before, "none was restarted"


def test_a_larger_placement_starts_what_is_lacking_and_a_smaller_one_ends_it_again() -> None:
    cluster = Cluster.of(of(EPD=2))
    assert cluster.move(of(E=4, PD=3)) == of(E=4, PD=3)
    assert cluster.move(of(EPD=2)) == of(EPD=2)


def test_without_a_scaler_instances_that_are_too_many_stay() -> None:
    placed = [Placed(f"t{number}", Kind(Role.EPD), Role.EPD, True, ALL) for number in range(4)]
    steps = next_steps(of(EPD=2), placed, {})
    assert steps.sizes is None
    assert steps.is_done


def test_a_bound_stops_the_growth() -> None:
    cluster = Cluster.of(of(EPD=2), most=3)
    assert cluster.move(of(EPD=6)) == of(EPD=3)


def test_an_instance_switches_to_roles_of_its_tier_only() -> None:
    cluster = Cluster.of({Kind(Role.E, "slow"): 2, Kind(Role.PD, "slow"): 1, Kind(Role.PD, "fast"): 2}, least=0)
    wanted = {Kind(Role.E, "slow"): 1, Kind(Role.PD, "slow"): 2, Kind(Role.PD, "fast"): 1, Kind(Role.E, "fast"): 1}
    before = set(cluster.instances)
    assert cluster.move(wanted) == wanted
    assert set(cluster.instances) == before, "none was restarted"


def test_counts_move_within_tiers_and_a_tier_may_be_given_up() -> None:
    cluster = Cluster.of(
        {Kind(Role.E, "slow"): 1, Kind(Role.PD, "slow"): 3, Kind(Role.PD, "fast"): 1}, switchable=NONE, least=0
    )
    wanted = {Kind(Role.E, "slow"): 2, Kind(Role.PD, "fast"): 3}
    assert cluster.move(wanted) == wanted
    cluster.pools = {kind: PoolSize(size.wanted, 1, size.most) for kind, size in cluster.pools.items()}
    assert cluster.move({Kind(Role.E, "slow"): 1, Kind(Role.PD, "slow"): 1})[Kind(Role.PD, "fast")] == 1, "it keeps one"


PLACEMENTS = (
    [of(EPD=count) for count in (1, 2, 5)]
    + [of(E=encoders, PD=texts) for encoders in (1, 3) for texts in (1, 4)]
    + [of(E=encoders, P=1, D=decoders) for encoders in (1, 2) for decoders in (1, 3)]
    + [of(EP=2, D=2), of(P=1, ED=3), of(E=1, EPD=2)]
)


@given(st.sampled_from(PLACEMENTS), st.lists(st.sampled_from(PLACEMENTS), min_size=1, max_size=4))
def test_any_placement_is_reached_from_any_other_and_every_stage_is_served_meanwhile(
    first: Counts, others: list[Counts]
) -> None:
    cluster = Cluster.of(first)
    for wanted in others:
        reached = cluster.move(wanted)
        least = len(first)  # each pool keeps one instance
        assert sum(reached.values()) == max(least, sum(wanted.values()))
        assert all(reached[role] >= count for role, count in wanted.items())


def test_no_stage_is_left_with_fewer_than_are_wanted_while_others_start() -> None:
    cluster = Cluster.of(of(EPD=4))
    wanted = of(E=2, PD=4)
    for _ in range(10):
        steps = cluster.step(wanted)
        assert cluster.serving()[Stage.ENCODE] >= 2
        assert cluster.serving()[Stage.DECODE] >= 4
        if steps.is_done:
            break
    assert cluster.roles() == wanted
