"""A plan of ``triptych plan --json`` as the pool manager follows it: the sizes of its pools, and the mix that it was made for."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Self

from triptych.domain.decision import Bounds
from triptych.domain.mix import Mix
from triptych.domain.pool_sizes import planned_most
from triptych.domain.scaling import Kind, PoolName
from triptych.runtime.plans import BadPlan, read


@dataclass(frozen=True, slots=True)
class FollowedPlan:
    """A plan that is followed. Tiers are those of ``Placement.hardware``."""

    model: str
    mix: Mix
    rate: float
    """Requests per second."""
    bounds: Mapping[Kind, Bounds]
    """From half of its instances to what the budget's devices allow."""
    most: Mapping[str, int]
    """Instances that the budget's devices allow on each tier, or twice those of the plan where it has no number."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises BadPlan."""
        plan = read(path)
        if plan.chosen is None:
            raise BadPlan("no candidate of the plan meets the objectives")
        if not plan.mix or not plan.budget.rate > 0:
            raise BadPlan("the plan does not say for which mix it was made: make it again with this version")
        placement, there_are = plan.chosen.placement, plan.budget.devices
        tiers = {devices: tier for tier, devices in placement.hardware.items()}
        pools = {Kind(pool.role, tiers[pool.device, pool.degree]): pool for pool in placement.pools.values()}
        sizes = {kind: pool.count for kind, pool in pools.items()}
        most = planned_most(
            sizes,
            {kind: pool.device for kind, pool in pools.items()},
            {kind: pool.degree for kind, pool in pools.items()},
            there_are,
        )
        whole = {}
        for tier, (device, degree) in placement.hardware.items():
            planned, count = sum(sizes[kind] for kind in sizes if kind.tier == tier), there_are.get(device)
            whole[tier] = 2 * planned if count is None else max(planned, count // degree)
        bounds = {kind: Bounds(ceil(count / 2), most[kind]) for kind, count in sizes.items()}
        return cls(plan.model_id, Mix(plan.mix), plan.budget.rate, bounds, whole)

    def kind_of(self, pool: PoolName) -> Kind:
        """A pool of the plan's model as the plan has it. The tier is empty where all instances are alike, and where it is unknown."""
        if "" in self.most:
            return Kind(pool.role)
        only = [kind.tier for kind in self.bounds if kind.role is pool.role]
        return Kind(pool.role, pool.tier or (only[0] if len(only) == 1 else ""))

    def bounds_of(self, pool: PoolName, *, replans: bool) -> Bounds | None:
        """Sizes that a pool may have; None if the plan does not say it. Where plans change, a pool may become as small as one instance,
        or none if its role has other tiers, and as large as all instances of its tier.
        """
        if pool.model != self.model:
            return None
        kind = self.kind_of(pool)
        if not replans:
            return self.bounds.get(kind)
        several = sum(planned.role is kind.role for planned in self.bounds) > 1
        return Bounds(0 if several else 1, self.most[kind.tier]) if kind.tier in self.most else None
