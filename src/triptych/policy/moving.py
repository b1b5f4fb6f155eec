"""Moving a cluster from one placement to another: which instances switch, and how many there are of each pool. ``next_steps`` is a pure
function, asked again and again until nothing is left to do.

Switches come first, and new instances at once. Instances end last, when all else is done. Each stage keeps an instance that serves it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.domain.replanning import Counts
from triptych.domain.stage import Role, Stage


@dataclass(frozen=True, slots=True)
class Placed:
    """An active instance."""

    instance_id: str
    pool: Role
    """Role of its pool."""
    role: Role
    """What it serves, or was ordered to serve."""
    is_settled: bool
    """Whether it serves what was ordered."""
    switchable: frozenset[Stage]
    """Stages that it can serve; empty if it cannot switch."""
    pending: int = 0
    """Requests and items that it has."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool that can be scaled."""

    wanted: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Steps:
    """What is to be done now. All is done if there is nothing, and nothing is awaited."""

    switches: tuple[tuple[str, Role], ...] = ()
    """Instances with their new roles."""
    sizes: Mapping[Role, int] | None = None
    """Sizes of pools; None if they are not to be changed here."""
    drain: str = ""
    """The instance that is to end, by which its pool becomes smaller."""
    waits: bool = False
    """Whether earlier steps are not done yet."""

    @property
    def is_done(self) -> bool:
        return not self.switches and not self.drain and not self.waits


def next_steps(wanted: Counts, instances: Sequence[Placed], pools: Mapping[Role, PoolSize]) -> Steps:
    """The steps from what there is towards the wanted placement. ``pools``: empty where nothing starts and stops instances."""
    starting = {role: max(0, size.wanted - _of_pool(instances, role)) for role, size in pools.items()}
    target = _reachable(wanted, instances, pools)
    have: Counter[Role] = Counter(instance.role for instance in instances)
    for role, count in starting.items():
        have[role] += count
    lacking = Counter({role: count - have[role] for role, count in target.items() if count > have[role]})
    surplus = Counter({role: have[role] - target[role] for role in have if have[role] > target[role]})
    switches = _switches(instances, lacking, surplus)
    grown = _grown(instances, lacking, sum(surplus.values()), pools)
    sizes = {role: size.wanted + grown[role] for role, size in pools.items()}
    waits = any(starting.values()) or any(grown.values()) or not all(instance.is_settled for instance in instances)
    waits = waits or any(size.wanted < _of_pool(instances, role) for role, size in pools.items())
    drain = ""
    if not switches and not waits and not lacking:
        drain, pool = _drained(instances, surplus, pools)
        if pool is not None:
            sizes[pool] -= 1
        else:
            switches = _exchanged(instances, surplus, pools)
    return Steps(tuple(switches), sizes if pools else None, drain, waits)


def _of_pool(instances: Sequence[Placed], role: Role) -> int:
    return sum(instance.pool is role for instance in instances)


def _reachable(wanted: Counts, instances: Sequence[Placed], pools: Mapping[Role, PoolSize]) -> Counter[Role]:
    """The wanted placement with the instances that cannot be ended: they serve what most serve."""
    target = Counter({role: count for role, count in wanted.items() if count})
    least = sum(size.least for size in pools.values()) if pools else len(instances)
    if (more := least - sum(target.values())) > 0:
        target[max(target, key=lambda role: (target[role], role.value))] += more
    return target


def _switches(instances: Sequence[Placed], lacking: Counter[Role], surplus: Counter[Role]) -> list[tuple[str, Role]]:
    """Takes from ``lacking`` and ``surplus`` what the switches give."""
    switches: list[tuple[str, Role]] = []
    serving = Counter(stage for instance in instances if instance.is_settled for stage in instance.role.stages)
    free = [instance for instance in _least_pending(instances) if instance.is_settled]
    for role in sorted(lacking, key=lambda role: (-lacking[role], role.value)):
        for instance in [instance for instance in free if role.stages <= instance.switchable]:
            closed = instance.role.stages - role.stages
            is_last = any(serving[stage] == 1 for stage in closed)
            if not lacking[role] or not surplus[instance.role] or is_last:
                continue
            free.remove(instance)
            serving.subtract(closed)
            lacking[role] -= 1
            surplus[instance.role] -= 1
            switches.append((instance.instance_id, role))
    for counts in (lacking, surplus):
        for role in [role for role, count in counts.items() if not count]:
            del counts[role]
    return switches


def _grown(
    instances: Sequence[Placed], lacking: Counter[Role], surplus: int, pools: Mapping[Role, PoolSize]
) -> Counter[Role]:
    """How many instances are to be started in each pool, for what those that are there cannot give by a later switch."""
    grown: Counter[Role] = Counter()
    flexible = {instance.pool for instance in instances if instance.switchable}
    left = surplus if flexible else 0
    for role in sorted(lacking, key=lambda role: role.value):
        for _ in range(lacking[role]):
            if left:
                left -= 1
                continue
            able = [role, *sorted(flexible - {role}, key=lambda pool: pool.value)]
            pool = next(
                (pool for pool in able if pool in pools and pools[pool].wanted + grown[pool] < pools[pool].most), None
            )
            if pool is not None:
                grown[pool] += 1
    return grown


def _drained(
    instances: Sequence[Placed], surplus: Counter[Role], pools: Mapping[Role, PoolSize]
) -> tuple[str, Role | None]:
    """The instance that is to end, with its pool: of those that are too many, the one with the least to finish."""
    serving = Counter(stage for instance in instances for stage in instance.role.stages)
    for instance in _least_pending(instances):
        is_last = any(serving[stage] == 1 for stage in instance.role.stages)
        if surplus[instance.role] > 0 and _shrinks(instance, pools) and not is_last:
            return instance.instance_id, instance.pool
    return "", None


def _exchanged(
    instances: Sequence[Placed], surplus: Counter[Role], pools: Mapping[Role, PoolSize]
) -> list[tuple[str, Role]]:
    """A switch of an instance that is too many and cannot end, to the role of one that can end in its place."""
    serving = Counter(stage for instance in instances for stage in instance.role.stages)
    roles = {instance.role for instance in instances if _shrinks(instance, pools)}
    for instance in _least_pending(instances):
        for role in sorted(roles - {instance.role}, key=lambda role: role.value):
            closed = instance.role.stages - role.stages
            is_last = any(serving[stage] == 1 for stage in closed)
            if surplus[instance.role] > 0 and role.stages <= instance.switchable and not is_last:
                return [(instance.instance_id, role)]
    return []


def _shrinks(instance: Placed, pools: Mapping[Role, PoolSize]) -> bool:
    """Whether the pool of an instance may have one less."""
    size = pools.get(instance.pool)
    return size is not None and size.wanted > size.least


def _least_pending(instances: Sequence[Placed]) -> list[Placed]:
    return sorted(instances, key=lambda instance: (instance.pending, instance.instance_id))
