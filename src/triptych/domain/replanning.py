"""A plan that is followed while the mix of requests changes: drifts, what is asked of a search, and what came of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from triptych.domain.mix import Mix
from triptych.domain.scaling import Kind
from triptych.domain.stage import INSTANCE_NAMES, Role

Counts = Mapping[Kind, int]
"""Instances by role and tier."""


@dataclass(frozen=True, slots=True)
class RoleCount:
    role: Role
    count: int
    tier: str = ""
    """Their devices; empty where all instances are on devices of one kind and number."""

    @property
    def kind(self) -> Kind:
        return Kind(self.role, self.tier)


def role_counts(counts: Counts) -> tuple[RoleCount, ...]:
    """In the usual order of roles, without those that have no instance."""
    order = list(INSTANCE_NAMES)
    kinds = sorted(counts, key=lambda kind: (order.index(kind.role), kind.tier))
    return tuple(RoleCount(kind.role, counts[kind], kind.tier) for kind in kinds if counts[kind])


def by_kind(counts: tuple[RoleCount, ...]) -> Counter[Kind]:
    return Counter({entry.kind: entry.count for entry in counts})


def in_letters(counts: tuple[RoleCount, ...]) -> str:
    """As ``--roles`` has them: ``E:2,PD:1``."""
    return ",".join(f"{entry.kind}:{entry.count}" for entry in counts) or "nothing"


@dataclass(frozen=True, slots=True)
class Drift:
    """The population stability index of one figure of the mix (``policy.drift``)."""

    figure: str
    index: float
    bound: float
    """What the index must exceed to count."""

    @property
    def is_one(self) -> bool:
        return self.index > self.bound

    def __str__(self) -> str:
        return f"{self.figure} {self.index:.2f}"


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """Question to a search: whether another placement is better for the mix that is seen."""

    present: tuple[RoleCount, ...]
    """What the members serve now."""
    mix: Mix
    rate: float
    """Requests per second."""
    kinds: frozenset[Kind]
    """Roles that instances can be given, on each tier."""
    most: Mapping[str, int]
    """Instances that there can be on each tier."""
    scales: bool
    """Whether instances can be started and stopped."""
    gain: float
    """By how much another placement must be better, as a share."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Answer of a search. ``wanted`` is the present placement if nothing is better by enough."""

    wanted: tuple[RoleCount, ...]
    gain: float
    """By how much it is better, as a share: of the price, else of the requests that meet the objectives."""
    reason: str


class PlanOutcome(StrEnum):
    KEPT = "kept"
    """Nothing is better by enough."""
    ADVISED = "advised"
    """Something is better, and nothing moves there."""
    MOVING = "moving"
    MOVED = "moved"
    FAILED = "failed"
    """The search, or the move, has not succeeded."""


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """What came of one search."""

    number: int
    age_s: float
    """Time since the decision, seconds."""
    present: tuple[RoleCount, ...]
    wanted: tuple[RoleCount, ...]
    gain: float
    reason: str
    outcome: PlanOutcome


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """How a pool manager follows its plan, for people."""

    model: str
    replans: bool
    """Whether it moves to better placements."""
    present: tuple[RoleCount, ...]
    """What the members serve now."""
    drifts: tuple[Drift, ...]
    state: str
    """In words: what it waits for, or does."""
    decisions: tuple[PlanDecision, ...]
    """The last ones, oldest first."""
