"""Sizes that pools may have."""

from dataclasses import dataclass

from triptych.domain.decision import Bounds
from triptych.domain.limits import Positive, PositiveSeconds, Seconds, check_limits
from triptych.domain.pool_sizes import MAX_POOL_SIZE, bounds_of, parse_bounds
from triptych.domain.scaling import PoolName


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Sizes that pools may have, and patience with the scaler."""

    min_instances: Positive = 1
    """Smallest size of a pool."""
    max_instances: Positive = 64
    """Largest size of a pool."""
    pool_sizes: tuple[str, ...] = ()
    """Smallest and largest size of single pools, as [MODEL/]ROLE[@TIER]=LEAST-MOST (E=1-8, demo/PD=2-4,
    PD@l4=0-8), comma-separated."""
    start_s: PositiveSeconds = 60.0
    """Time from an order until an instance is ready, where no profile says it."""
    adopt_s: Seconds = 10.0
    """A pool that was just found is not changed for this long, so that its members can register."""
    initial_from_history: bool = False
    """Whether a pool of which the store has no size starts with the size that the load of this hour needed in earlier
    weeks. Without a history it starts with its largest size. If false, it starts with the instances that it has.
    """
    scaler_timeout_s: PositiveSeconds = 10.0
    """Longest time of a call to the scaler."""

    def __post_init__(self) -> None:
        check_limits(self, ("min_instances", "max_instances"))
        if self.max_instances > MAX_POOL_SIZE:
            raise ValueError(f"max_instances is {self.max_instances}, must be at most {MAX_POOL_SIZE}")
        try:
            for entry in self.pool_sizes:
                parse_bounds(entry)
        except ValueError as error:
            raise ValueError(f"pool_sizes: {error}") from None

    def own_bounds(self, pool: PoolName) -> Bounds | None:
        """The bounds of this pool alone; None if there are none."""
        return bounds_of(pool, self.pool_sizes)

    def bounds(self, pool: PoolName) -> Bounds:
        return self.own_bounds(pool) or Bounds(self.min_instances, self.max_instances)
