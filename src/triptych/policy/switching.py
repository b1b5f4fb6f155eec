"""Switching: which instances are to serve another stage (EPD-Serve section 3.2.4), from what each stage holds and what arrives there.

``decide`` is a pure function. It looks a few seconds ahead, so that instances move before a queue is long, and weighs what the stage
that is short saves against what the other loses: so it moves as many at once as pay, and none for a short peak.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from triptych.domain.limits import Positive, PositiveSeconds, Ratio, Seconds, check_limits
from triptych.domain.stage import Stage

_SHORT = 1.0
"""A stage is short of instances if it is going to hold more than this multiple of what its instances may hold."""


@dataclass(frozen=True, slots=True)
class SwitchLimits:
    """Speed and caution of switching."""

    switch_ahead_s: PositiveSeconds = 5.0
    """Time ahead: what stages will hold then decides, so that a queue is seen before it is there. Looking further, a few requests that come
    together look like a load that grows."""
    switch_horizon_s: PositiveSeconds = 60.0
    """Time over which a switch must save more than it costs. Loads that change faster than this are not followed."""
    switch_spare: Ratio = 0.5
    """The stage that gives instances must keep below this share of what the rest may hold, so that it does not take them back."""
    switch_cost_s: Seconds = 0.7
    """Time for which an instance that switches serves nobody (EPD-Serve states less than 0.7 s)."""
    switch_windows: Positive = 2
    """Decisions in a row, one per second, that must agree: one alone may be a burst of a few requests."""
    switch_rest_s: PositiveSeconds = 10.0
    """Shortest time between two switches between the same two stages, in either direction."""

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.switch_spare < _SHORT:
            raise ValueError(f"switch_spare is {self.switch_spare}, must be below {_SHORT:g}")


@dataclass(frozen=True, slots=True)
class Movable:
    """An instance that serves one stage alone and can serve others."""

    instance_id: str
    stages: frozenset[Stage]
    """Stages that it can serve."""
    held: float = 0.0
    """The instance's part of what the stage holds: it is to be finished, or transferred."""
    opens_s: Mapping[Stage, float] = field(default_factory=dict)
    """How long it must load weights before it can serve a stage; 0 where it does not say."""


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage of a model. Work is measured in seconds of one instance under such a load, but at the decode stage in running answers."""

    stage: Stage
    instances: int
    """Instances that serve it."""
    held: float
    """Work that waits or runs there."""
    holds: float
    """The most of it that one instance may hold within the objectives."""
    arriving: float
    """Work that comes per second. If ``served`` is 0: by how much what is held grows per second."""
    served: float = 0.0
    """Work that one instance bears per second within the objectives; 0 where that is not known apart from what arrives."""
    movable: tuple[Movable, ...] = ()

    def after(self, seconds: float, instances: int) -> float:
        """Work that is held then, if so many instances serve it from now on."""
        return max(0.0, self.held + (self.arriving - instances * self.served) * seconds)

    def pressure(self, seconds: float, instances: int) -> float:
        """Work that is held then, over what the instances may hold."""
        if held := self.after(seconds, instances):
            return held / (instances * self.holds) if instances else inf
        return 0.0

    def late_s(self, instances: int, horizon_s: float) -> float:
        """Work that is held beyond that, summed over the horizon, in seconds of the instances that could hold it."""
        late, slope = self.held - instances * self.holds, self.arriving - instances * self.served
        last = late + slope * horizon_s
        if late <= 0 and last <= 0:
            return 0.0
        if late >= 0 and last >= 0:
            return (late + last) / 2 * horizon_s / self.holds
        return max(late, last) ** 2 / (2 * abs(slope)) / self.holds


@dataclass(frozen=True, slots=True)
class Switch:
    """Instances of stage ``source`` are to serve ``target`` instead."""

    source: Stage
    target: Stage
    instances: tuple[str, ...]
    reason: str = ""

    @property
    def pair(self) -> frozenset[Stage]:
        return frozenset((self.source, self.target))


def decide(stages: Sequence[StageView], limits: SwitchLimits) -> Switch | None:
    """The switch that saves most, for the stage that is shortest of instances; None if there is none that pays."""
    short = [view for view in stages if view.pressure(limits.switch_ahead_s, view.instances) > _SHORT]
    for target in sorted(short, key=lambda view: -view.pressure(limits.switch_ahead_s, view.instances)):
        possible = [found for source in stages if source is not target for found in _switches(source, target, limits)]
        saved_s, best = max(possible, key=lambda option: (option[0], -len(option[1].instances)), default=(0.0, None))
        if saved_s > 0:
            return best
    return None


def _switches(source: StageView, target: StageView, limits: SwitchLimits) -> Iterator[tuple[float, Switch]]:
    """Instances that can be moved from one stage to another, and the seconds of an instance that it saves; those with least to finish first."""
    fitting = [instance for instance in source.movable if target.stage in instance.stages]
    moved = sorted(
        fitting,
        key=lambda instance: (
            instance.opens_s.get(target.stage, 0.0) + instance.held / source.holds,
            instance.instance_id,
        ),
    )
    cost_s = 0.0
    for count, instance in enumerate(moved, start=1):
        left, grown = source.instances - count, target.instances + count
        if not _can_spare(source, left, limits):
            return
        cost_s += limits.switch_cost_s + instance.opens_s.get(target.stage, 0.0) + instance.held / source.holds
        saved_s = target.late_s(target.instances, limits.switch_horizon_s) - target.late_s(
            grown, limits.switch_horizon_s
        )
        lost_s = source.late_s(left, limits.switch_horizon_s) - source.late_s(source.instances, limits.switch_horizon_s)
        text = (
            f"{target.stage.value} holds {target.after(limits.switch_ahead_s, target.instances):.3g} in {limits.switch_ahead_s:g} s, "
            f"{target.instances * target.holds:.3g} are within its objective"
        )
        names = tuple(instance.instance_id for instance in moved[:count])
        yield saved_s - lost_s - cost_s, Switch(source.stage, target.stage, names, text)


def _can_spare(source: StageView, left: int, limits: SwitchLimits) -> bool:
    """Whether so many instances are enough for the stage, now and soon."""
    if left < 1 or source.arriving > left * source.served > 0:
        return False
    return max(source.pressure(0.0, left), source.pressure(limits.switch_ahead_s, left)) < limits.switch_spare
