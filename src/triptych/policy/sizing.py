"""The largest batch and the tensor-parallel degree of a pool's instances (ModServe section 4.2)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triptych.policy.capacity import Capacity

MARGIN = 0.05
"""A larger batch, or a larger degree, must bear more than this share of load more."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """The chosen size. ``reason`` says why, or that no size meets the objectives (``capacity.per_s`` is 0)."""

    tensor_parallel: int
    max_batch: int
    capacity: Capacity
    reason: str


@dataclass(frozen=True, slots=True)
class BatchChange:
    """Another largest batch that bears more. ``now`` and ``best`` are items of a pass, or sequences of a step."""

    now: int
    best: int
    gain: float
    """Share of load that an instance bears more with it."""

    def __str__(self) -> str:
        return f"batches of up to {self.best} instead of {self.now} bear {self.gain:.0%} more within the objectives"


@dataclass(frozen=True, slots=True)
class DegreeChange:
    """Another tensor-parallel degree that bears more per device."""

    now: int
    best: int
    gain: float
    """Share of load that a device bears more with it."""

    def __str__(self) -> str:
        return f"degree {self.best} instead of {self.now} bears {self.gain:.0%} more per device within the objectives"


def better_degree(capacity_of: Mapping[int, Callable[[int], Capacity]], now: int, *, most: int) -> DegreeChange | None:
    """The degree that ``choose_size`` prefers, if it bears over 5 % more per device than that of now with its best batch. None where no
    size meets the objectives, or nothing is known of the degree of now.
    """
    if now not in capacity_of:
        return None
    chosen = choose_size(capacity_of, most=most)
    before = _largest_batch(capacity_of[now], most)[1].tokens_per_s / now
    per_device = chosen.capacity.tokens_per_s / chosen.tensor_parallel
    if chosen.tensor_parallel == now or not chosen.capacity.per_s or per_device <= (1 + MARGIN) * before:
        return None
    return DegreeChange(now, chosen.tensor_parallel, per_device / before - 1 if before else 1.0)


def better_batch(capacity_at: Callable[[int], Capacity], now: int, *, most: int) -> BatchChange | None:
    """The largest batch that is worth a change while instances run; None if none, from 1 to ``most``, bears over 5 % more."""
    best, capacity = _largest_batch(capacity_at, most)
    before = capacity_at(now).tokens_per_s
    if best == now or capacity.tokens_per_s <= (1 + MARGIN) * before:
        return None
    return BatchChange(now, best, capacity.tokens_per_s / before - 1 if before else 1.0)


def choose_size(capacity_of: Mapping[int, Callable[[int], Capacity]], *, most: int) -> Sizing:
    """The tensor-parallel degree and largest batch with the highest capacity per device.

    ``capacity_of`` has for each degree with a profile the capacity of one replica by its largest batch, from 1 to
    ``most``. A batch is doubled only while that raises the capacity by more than 5 %; a larger degree must be better per
    device by more than 5 %. If nothing meets the objectives, it is the size with the shortest latency. Raises ValueError
    without any degree.
    """
    if not capacity_of:
        raise ValueError("there is no profile to choose a size from")
    chosen: Sizing | None = None
    failed: Sizing | None = None
    for degree in sorted(capacity_of):
        batch, capacity = _largest_batch(capacity_of[degree], most)
        if not capacity.per_s:
            if failed is None or capacity.latency_s < failed.capacity.latency_s:
                reason = f"no size meets the objectives: even without load it takes {capacity.latency_s:.3g} s"
                failed = Sizing(degree, batch, capacity, reason)
            continue
        per_device = capacity.tokens_per_s / degree
        if chosen is None or per_device > (1 + MARGIN) * chosen.capacity.tokens_per_s / chosen.tensor_parallel:
            reason = f"{per_device:.3g} tokens/s per device within the objectives, with batches of up to {batch}"
            chosen = Sizing(degree, batch, capacity, reason)
    result = chosen or failed
    assert result is not None  # noqa: S101  # every degree is one of both
    return result


def _largest_batch(capacity_at: Callable[[int], Capacity], most: int) -> tuple[int, Capacity]:
    batch, best = 1, capacity_at(1)
    while batch < most:
        doubled = min(2 * batch, most)
        capacity = capacity_at(doubled)
        if capacity.tokens_per_s <= (1 + MARGIN) * best.tokens_per_s:
            break
        batch, best = doubled, capacity
    return batch, best
