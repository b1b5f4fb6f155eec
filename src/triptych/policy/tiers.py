"""The order in which pools of one role on several kinds of devices grow and shrink."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from triptych.domain.decision import Bounds, TierShare


@dataclass(frozen=True, slots=True)
class TierView:
    """A pool among those of its model and role."""

    pool: str
    wanted: int
    """Size ordered last."""
    ready: int
    bounds: Bounds
    capacity_per_s: float | None
    """Load that an instance bears within its objectives. None if it is unknown, or it misses them even alone."""
    usd_per_hour: float | None
    """Price of an instance. None if it is unknown."""
    given_up: bool = False
    """Whether none of its instances starts any more."""

    @property
    def _cost(self) -> tuple[bool, float, str]:
        """Those whose instances meet the objectives come first, by price per load that they bear."""
        price = inf if self.usd_per_hour is None else self.usd_per_hour
        return not self.capacity_per_s, price / (self.capacity_per_s or 1.0), self.pool

    @property
    def can_grow(self) -> bool:
        return bool(self.capacity_per_s) and self.wanted < self.bounds.most and not self.given_up


def shares(tiers: Sequence[TierView]) -> dict[str, TierShare]:
    """What the others of its role leave to each pool, by pool.

    The cheapest tier that meets the objectives grows first, a dearer one when no cheaper one can. The dearest shrinks first. Cheap is
    a low price per load that an instance bears within its objectives.
    """
    ordered = sorted(tiers, key=lambda tier: tier._cost)  # noqa: SLF001 - of this module
    shared: dict[str, TierShare] = {}
    for place, tier in enumerate(ordered):
        others = [other for other in ordered if other is not tier]
        cheaper = next((other.pool for other in ordered[:place] if other.can_grow), "")
        dearer = next((other.pool for other in reversed(ordered[place + 1 :]) if other.wanted > other.bounds.least), "")
        shared[tier.pool] = TierShare(
            ordered_per_s=sum(other.wanted * (other.capacity_per_s or 0.0) for other in others),
            ready_per_s=sum(other.ready * (other.capacity_per_s or 0.0) for other in others),
            grows_first=cheaper,
            shrinks_first=dearer,
        )
    return shared
