"""Inputs and results of scaling decisions: plain records, so that each decision can be replayed.

All times are durations in seconds before now, or from now on.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from triptych.domain.windows import NOTHING_JUDGED, Judged


class InstancePhase(StrEnum):
    """An instance as decisions on the size of its pool see it: what its process (``ProcessPhase``, of the scaler) and the member
    (``MemberCondition``) say, put together.
    """

    STARTING = "starting"
    """Ordered, and not ready yet."""
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    """No work is left on the instance; it can be stopped."""
    LOST = "lost"
    """The process runs, but has not been heard of for long: it hangs, or is cut off."""


@dataclass(frozen=True, slots=True)
class PoolInstance:
    instance_id: str
    phase: InstancePhase
    age_s: float = 0.0
    """Time in this phase, seconds."""
    running: int = 0
    """Requests or items that it has."""
    leased_bytes: int = 0
    judged: Judged = NOTHING_JUDGED
    """Requests by TTFT in the attainment window; a miss that another stage is charged with counts as met."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Sizes that the pool may have."""

    least: int = 1
    most: int = 1


@dataclass(frozen=True, slots=True)
class Override:
    """A size that a person asked for, until it ends."""

    size: int
    left_s: float


@dataclass(frozen=True, slots=True)
class PlannedSize:
    """The size that a plan has for a pool."""

    size: int
    reason: str
    drain: str = ""
    """The instance that ends first if the pool becomes smaller; empty for the one with least to finish."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Offered load, in tokens per second: of embeddings for encoders, of prompts for text instances."""

    burst_per_s: float
    """Over the last 5 s."""
    short_per_s: float
    """Over 30 s."""
    long_per_s: float
    """Over 300 s."""
    peak_per_s: float
    """The highest short window since the last reconfiguration, or the highest burst less what may wait until after it."""
    waiting: float
    """Tokens of requests that wait for this stage."""
    coverage: float
    """Share of the routers' time, over 30 s, that reports cover. Loads are scaled up to the whole."""
    announced: float = 0.0
    """Tokens of requests that an earlier stage still has: of prompts whose items are not encoded yet."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Facts of a profile on a pool under the present mix. None if it is unknown."""

    capacity_per_s: float | None = None
    """Load that one replica bears within its objectives."""
    wait_objective_s: float | None = None
    """Longest wait in the queue within the objective."""
    batch: int | None = None
    """Items or answers that it has in one pass or step at that load."""
    missing: tuple[str, ...] = ()
    """Why something is unknown."""
    start_s: float | None = None
    """Time from the start of an instance's process until it is ready, seconds."""
    busy_per_s: float | None = None
    """Load that one replica works off while it is never idle. Above its capacity, which leaves it idle so that little waits. None for
    hybrids.
    """


@dataclass(frozen=True, slots=True)
class TierShare:
    """What the other tiers of its role leave to a pool. Loads are in tokens per second."""

    ordered_per_s: float = 0.0
    """Load that the instances bear which are ordered there ..."""
    ready_per_s: float = 0.0
    """... and those that are ready."""
    grows_first: str = ""
    """A cheaper pool that can grow; empty if there is none."""
    shrinks_first: str = ""
    """A dearer pool that can shrink; empty if there is none."""


NO_OTHER_TIERS = TierShare()


@dataclass(frozen=True, slots=True)
class PoolView:
    """Everything that a decision depends on."""

    pool: str
    wanted: int
    """Size ordered last."""
    bounds: Bounds
    instances: tuple[PoolInstance, ...] = ()
    load: PoolLoad | None = None
    """Load of the pool. None without a usable report."""
    report_age_s: float | None = None
    facts: PoolFacts = PoolFacts()
    switched: int = 0
    """Instances of other pools that serve its stage now, less its own that serve another."""
    since_switch_s: float | None = None
    """Time since the last order to switch to its stage or from it, seconds."""
    tiers: TierShare = NO_OTHER_TIERS
    """What the other tiers of its role do."""
    attainment: Judged = NOTHING_JUDGED
    """Requests by TTFT in the attainment window; only misses that this pool is charged with are missed."""
    start_s: float = 60.0
    """Usual time from an order until an instance is ready."""
    override: Override | None = None
    planned: PlannedSize | None = None
    """The size by a plan, where plans decide on sizes."""
    frozen: str = ""
    """Why nothing may be ordered now; empty if it may."""
    since_growth_s: float | None = None
    changes_last_hour: int = 0
    period_due: bool = False
    """The periodic reconfiguration is due."""
    low_periods: int = 0
    """Periods in a row, before this one, whose load permitted a smaller pool."""
    futile_growths: int = 0
    """Growths in this breach, without need by load, that did not improve attainment."""

    def count(self, phase: InstancePhase) -> int:
        return sum(instance.phase is phase for instance in self.instances)

    @property
    def serving(self) -> int:
        """Instances that take work of its stage, wherever they belong."""
        return max(0, self.count(InstancePhase.READY) + self.switched)


class Why(StrEnum):
    """Reasons of decisions, as shown in metrics."""

    LOAD = "load"
    WAIT = "wait"
    BREACH = "breach"
    BOUNDS = "bounds"
    OVERRIDE = "override"
    LOW_LOAD = "low load"
    STEADY = "steady"
    FROZEN = "frozen"
    NO_REPORT = "no report"
    NOT_CURED = "not cured"
    """More instances do not help."""
    SICK = "sick instance"
    SATURATED = "saturated"
    """More is needed than the upper bound allows."""
    COOLDOWN = "cooldown"
    BUDGET = "budget"
    SETTLING = "settling"
    """Instances that were ordered have not taken effect yet."""
    CAUTION = "caution"
    """The load would permit a smaller pool, but something else does not."""
    LIMITS = "limits"
    """The size stays; the limits of batches change."""
    TIER = "tier"
    """Another tier of the role grows or shrinks first."""
    DEGREE = "degree"
    """The size stays; instances get another tensor-parallel degree."""
    PLAN = "plan"
    """The plan that is followed has this size."""


@dataclass(frozen=True, slots=True)
class Reason:
    why: Why
    text: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The wanted size from now on, and why. With ``drain`` that instance is to be drained first."""

    target: int
    reasons: tuple[Reason, ...]
    drain: str = ""
    needed: int | None = None
    """Replicas for the load, before any limit; None if unknown."""
    breach: bool = False
    low: bool = False
    """The load permits a smaller pool."""
    saturated: bool = False
    sick: str = ""
    """An instance that has most of the misses."""
    missing: tuple[str, ...] = ()

    @property
    def why(self) -> Why:
        """The main reason."""
        return self.reasons[0].why


class DecisionOutcome(StrEnum):
    """Outcome of a decision."""

    PENDING = "pending"
    DONE = "done"
    """The pool has the size."""
    ADVISED = "advised"
    """The decision is not carried out: advisory mode."""
    REPLACED = "replaced"
    """A newer decision came first, or a later leader, which orders the size anew."""
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """Record of a decision that changed the wanted size, or that said something new."""

    number: int
    view: PoolView
    decision: Decision
    outcome: DecisionOutcome = DecisionOutcome.PENDING
    detail: str = ""
    age_s: float = 0.0
    """Time since the decision, when the record is read, seconds."""


@dataclass(frozen=True, slots=True)
class DecisionSummary:
    """A decision for people: its record without the single instances."""

    number: int
    age_s: float
    """Time since the decision, seconds."""
    wanted: int
    """Size before it."""
    target: int
    reasons: tuple[Reason, ...]
    """The main one first."""
    drain: str
    sick: str
    missing: tuple[str, ...]
    ready: int
    starting: int
    draining: int
    load: PoolLoad | None
    capacity_per_s: float | None
    needed: int | None
    attainment: Judged
    report_age_s: float | None
    """Age of the report, seconds. This and the fields above are what was seen, as in ``PoolView`` and ``Decision``."""
    outcome: DecisionOutcome
    detail: str

    @classmethod
    def of(cls, record: DecisionRecord) -> Self:
        view, decision = record.view, record.decision
        return cls(
            number=record.number,
            age_s=record.age_s,
            wanted=view.wanted,
            target=decision.target,
            reasons=decision.reasons,
            drain=decision.drain,
            sick=decision.sick,
            missing=decision.missing,
            ready=view.count(InstancePhase.READY),
            starting=view.count(InstancePhase.STARTING),
            draining=view.count(InstancePhase.DRAINING) + view.count(InstancePhase.DRAINED),
            load=view.load,
            capacity_per_s=view.facts.capacity_per_s,
            needed=decision.needed,
            attainment=view.attainment,
            report_age_s=view.report_age_s,
            outcome=record.outcome,
            detail=record.detail,
        )


class PoolState(StrEnum):
    STEADY = "steady"
    GROWING = "growing"
    SHRINKING = "shrinking"
    BREACH = "breach"
    """Attainment is below its threshold."""
    FROZEN = "frozen"
    """The pool manager orders nothing: ``ScalingStatus.fault`` says why."""


class Acting(StrEnum):
    """Sizes that a pool manager carries out."""

    NONE = "none"
    """The pool manager has no scaler, so it orders nothing."""
    MANUAL = "manual"
    """The pool manager orders the sizes that are set by hand."""
    ALL = "all"

    @property
    def advisory(self) -> bool:
        """Decisions are recorded only."""
        return self is not Acting.ALL


@dataclass(frozen=True, slots=True)
class ScalingStatus:
    """The size of a pool, for people."""

    name: str
    state: PoolState
    acting: Acting
    wanted: int
    ready: int
    starting: int
    draining: int
    """Includes what has drained."""
    bounds: Bounds
    attainment: Judged
    override: Override | None
    fault: str
    """Why the pool does not become what is wanted; empty while nothing is wrong."""
    decisions: tuple[DecisionSummary, ...]
    """The last ones, oldest first."""
    advice: tuple[str, ...] = ()
    """Advice to people: the size of batches, the tensor-parallel degree, which instances share a host."""
    attainment_window_s: float = 0.0
    """Over which ``attainment`` is taken."""
    rolling: str = ""
    """How far the pool has come that changes its tensor-parallel degree; empty if it does not."""


@dataclass(frozen=True, slots=True)
class SavedPool:
    """State that a leader leaves to the next one."""

    wanted: int
    override: Override | None = None
    given_up: str = ""
    changes_s: tuple[float, ...] = ()
    """Time since each change of the last hour, when this was written."""
    decisions_s: tuple[tuple[int, float], ...] = ()
    """Numbers of the last decisions, and the time since each."""
