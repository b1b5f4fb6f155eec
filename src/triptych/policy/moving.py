"""Moving a cluster from one placement to another: which instances switch, and how many there are of each pool. ``next_steps`` is a pure
function, asked again and again until nothing is left to do.

An instance stays on its tier: it switches to roles that are wanted there. Switches come first, and new instances at once. Instances end
last, when all else is done. Each stage keeps as many instances as are wanted for it, or those that it has, and in any case one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.domain.replanning import Counts
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role, Stage


@dataclass(frozen=True, slots=True)
class Placed:
    """An active instance."""

    instance_id: str
    pool: Kind
    """Role and tier of its pool."""
    role: Role
    """What it serves, or was ordered to serve."""
    is_settled: bool
    """Whether it serves what was ordered."""
    switchable: frozenset[Stage]
    """Stages that it can serve; empty if it cannot switch."""
    pending: int = 0
    """Requests and items that it has."""

    @property
    def kind(self) -> Kind:
        """What it serves, or was ordered to serve, on its tier."""
        return Kind(self.role, self.pool.tier)


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
    sizes: Mapping[Kind, int] | None = None
    """Sizes of pools; None if they are not to be changed here."""
    drain: str = ""
    """The instance that is to end, by which its pool becomes smaller."""
    waits: bool = False
    """Whether earlier steps are not done yet."""

    @property
    def is_done(self) -> bool:
        return not self.switches and not self.drain and not self.waits


def next_steps(wanted: Counts, instances: Sequence[Placed], pools: Mapping[Kind, PoolSize]) -> Steps:
    """The steps from what there is towards the wanted placement. ``pools``: empty where nothing starts and stops instances."""
    starting = {kind: max(0, size.wanted - _of_pool(instances, kind)) for kind, size in pools.items()}
    target = _reachable(wanted, instances, pools)
    have = Counter(instance.kind for instance in instances)
    have.update(starting)
    lacking = Counter({kind: count - have[kind] for kind, count in target.items() if count > have[kind]})
    surplus = Counter({kind: have[kind] - target[kind] for kind in have if have[kind] > target[kind]})
    switches = _switches(instances, lacking, surplus, target)
    grown = _grown(instances, lacking, surplus, pools)
    sizes = {kind: size.wanted + grown[kind] for kind, size in pools.items()}
    waits = any(starting.values()) or any(grown.values()) or not all(instance.is_settled for instance in instances)
    waits = waits or any(size.wanted < _of_pool(instances, kind) for kind, size in pools.items())
    if lacking and not switches and not waits:  # the way leads over fewer than are wanted
        switches = _switches(instances, lacking, surplus, Counter())
    drain = ""
    if not switches and not waits and not lacking:
        drain, pool = _drained(instances, surplus, pools)
        if pool is not None:
            sizes[pool] -= 1
        else:
            switches = _exchanged(instances, surplus, pools)
    return Steps(tuple(switches), sizes if pools else None, drain, waits)


def _of_pool(instances: Sequence[Placed], kind: Kind) -> int:
    return sum(instance.pool == kind for instance in instances)


def _reachable(wanted: Counts, instances: Sequence[Placed], pools: Mapping[Kind, PoolSize]) -> Counter[Kind]:
    """The wanted placement with the instances that cannot be ended: they serve what most serve on their tier."""
    target = Counter({kind: count for kind, count in wanted.items() if count})
    least: Counter[str] = Counter()
    if pools:
        least.update({tier: sum(size.least for kind, size in pools.items() if kind.tier == tier) for _, tier in pools})
    else:
        least.update(instance.pool.tier for instance in instances)
    for tier, fewest in least.items():
        own = {kind: count for kind, count in target.items() if kind.tier == tier}
        if (more := fewest - sum(own.values())) > 0:
            known = own or [kind for kind in (*(instance.kind for instance in instances), *pools) if kind.tier == tier]
            target[max(known, key=lambda kind: (target[kind], kind.role.value))] += more
    return target


def _switches(
    instances: Sequence[Placed], lacking: Counter[Kind], surplus: Counter[Kind], target: Counter[Kind]
) -> list[tuple[str, Role]]:
    """Takes from ``lacking`` and ``surplus`` what the switches give. Stages keep as many instances as ``target`` has, if there are as many."""
    switches: list[tuple[str, Role]] = []
    serving = Counter(stage for instance in instances if instance.is_settled for stage in instance.role.stages)
    wanted = Counter(stage for kind in target.elements() for stage in kind.role.stages)
    kept = {stage: max(1, min(count, wanted[stage])) for stage, count in serving.items()}
    free = [instance for instance in _least_pending(instances) if instance.is_settled]
    for kind in sorted(lacking, key=lambda kind: (-lacking[kind], str(kind))):
        role = kind.role
        able = [each for each in free if each.pool.tier == kind.tier and role.stages <= each.switchable]
        for instance in able:
            closed = instance.role.stages - role.stages
            too_few = any(serving[stage] <= kept[stage] for stage in closed)
            if not lacking[kind] or not surplus[instance.kind] or too_few:
                continue
            free.remove(instance)
            serving.subtract(closed)
            lacking[kind] -= 1
            surplus[instance.kind] -= 1
            switches.append((instance.instance_id, role))
    for counts in (lacking, surplus):
        for kind in [kind for kind, count in counts.items() if not count]:
            del counts[kind]
    return switches


def _grown(
    instances: Sequence[Placed], lacking: Counter[Kind], surplus: Counter[Kind], pools: Mapping[Kind, PoolSize]
) -> Counter[Kind]:
    """How many instances are to be started in each pool, for what those that are there cannot give by a later switch."""
    grown: Counter[Kind] = Counter()
    flexible = {instance.pool for instance in instances if instance.switchable}
    left: Counter[str] = Counter()
    for kind, count in surplus.items():
        if any(pool.tier == kind.tier for pool in flexible):
            left[kind.tier] += count
    for kind in sorted(lacking, key=str):
        others = sorted((pool for pool in flexible - {kind} if pool.tier == kind.tier), key=str)
        for _ in range(lacking[kind]):
            if left[kind.tier]:
                left[kind.tier] -= 1
                continue
            able = (pool for pool in (kind, *others) if pool in pools)
            pool = next((pool for pool in able if pools[pool].wanted + grown[pool] < pools[pool].most), None)
            if pool is not None:
                grown[pool] += 1
    return grown


def _drained(
    instances: Sequence[Placed], surplus: Counter[Kind], pools: Mapping[Kind, PoolSize]
) -> tuple[str, Kind | None]:
    """The instance that is to end, with its pool: of those that are too many, the one with the least to finish."""
    serving = Counter(stage for instance in instances for stage in instance.role.stages)
    for instance in _least_pending(instances):
        is_last = any(serving[stage] == 1 for stage in instance.role.stages)
        if surplus[instance.kind] > 0 and _shrinks(instance, pools) and not is_last:
            return instance.instance_id, instance.pool
    return "", None


def _exchanged(
    instances: Sequence[Placed], surplus: Counter[Kind], pools: Mapping[Kind, PoolSize]
) -> list[tuple[str, Role]]:
    """A switch of an instance that is too many and cannot end, to the role of one that can end in its place."""
    serving = Counter(stage for instance in instances for stage in instance.role.stages)
    kinds = {instance.kind for instance in instances if _shrinks(instance, pools)}
    for instance in _least_pending(instances):
        for role, tier in sorted(kinds - {instance.kind}, key=str):
            closed = instance.role.stages - role.stages
            is_last = any(serving[stage] == 1 for stage in closed)
            can = tier == instance.pool.tier and role.stages <= instance.switchable
            if surplus[instance.kind] > 0 and can and not is_last:
                return [(instance.instance_id, role)]
    return []


def _shrinks(instance: Placed, pools: Mapping[Kind, PoolSize]) -> bool:
    """Whether the pool of an instance may have one less."""
    size = pools.get(instance.pool)
    return size is not None and size.wanted > size.least


def _least_pending(instances: Sequence[Placed]) -> list[Placed]:
    return sorted(instances, key=lambda instance: (instance.pending, instance.instance_id))
