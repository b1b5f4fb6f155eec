"""Events and effects of a plan that is followed (``machine.pool_manager.plan``)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.domain.mix import Mix
from triptych.domain.replanning import PlanDecision, PlanQuestion, Proposal
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role
from triptych.policy.moving import Placed, PoolSize

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanTick:
    """What there is now. Comes about once per second, as long as this manager may order something."""

    mix: Mix
    """Of the shortest window with enough requests."""
    rate: float
    """Requests per second, in that window."""
    window_s: float
    """Length of that window."""
    instances: tuple[Placed, ...]
    pools: Mapping[Kind, PoolSize] = field(default_factory=dict)
    """Empty where nothing starts and stops instances."""


@dataclass(frozen=True, slots=True)
class PlanPaused:
    """Nothing may be ordered now: another manager leads, or the store is away."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlanFound:
    """A search has ended."""

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class SearchFailed:
    reason: str


PlanEvent = PlanTick | PlanPaused | PlanFound | SearchFailed

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """Begin a search. One at a time; ``PlanFound`` or ``SearchFailed`` follows."""

    question: PlanQuestion


@dataclass(frozen=True, slots=True)
class SwitchTo:
    instance_id: str
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class HoldSizes:
    """Sizes of all pools, until another order. ``drain``: the instance that ends first in a pool that becomes smaller."""

    sizes: Mapping[Kind, int]
    drain: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlanDecided:
    """Log a decision, or what came of an earlier one of this number."""

    decision: PlanDecision


PlanEffect = SearchPlan | SwitchTo | HoldSizes | PlanDecided
