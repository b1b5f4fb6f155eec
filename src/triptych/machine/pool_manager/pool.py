"""State of one pool: which size was decided, what was ordered, and the outcome. ``handle`` is the only mutator.

The pool decides at each tick (``policy.scaling``), and orders sizes, not instances. The scaler keeps the size, and
replaces an instance that died.
"""

from collections import deque
from dataclasses import dataclass, replace

from triptych.domain.decision import (
    Acting,
    Bounds,
    Decision,
    DecisionOutcome,
    DecisionRecord,
    DecisionSummary,
    InstancePhase,
    Override,
    PlannedSize,
    PoolInstance,
    PoolState,
    PoolView,
    Reason,
    SavedPool,
    ScalingStatus,
    Why,
)
from triptych.domain.limits import Positive, PositiveSeconds, Ratio, check_limits
from triptych.domain.stage import Role
from triptych.domain.windows import NOTHING_JUDGED
from triptych.machine.pool_manager.decision_log import DecisionLog
from triptych.machine.pool_manager.demand import Demand, Facts
from triptych.machine.pool_manager.pool_events import (
    DrainInstance,
    Frozen,
    InstancesSeen,
    Noted,
    OrderFailed,
    OrderTaken,
    OverrideEnded,
    OverrideSet,
    PoolEffect,
    PoolEvent,
    PoolResumed,
    PoolTick,
    RecordDecision,
    RemoveInstance,
    RolesSeen,
    ScaleTo,
    SizePlanned,
    StartFailed,
)
from triptych.machine.pool_manager.reports import RouterReports
from triptych.policy.scaling import ScalingLimits, decide

_HOUR_S = 3600.0
_SHOWN_DECISIONS = 10
_IMPROVEMENT = 0.01
"""Attainment must rise by this much for a growth to count as an improvement."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Patience with scalers and instances."""

    order_starts: Ratio = 3.0
    """An order is overdue after this multiple of the usual start time; it is then repeated, at growing distances."""
    drain_timeout_s: PositiveSeconds = 600.0
    """Time that a drained instance has; then the size is ordered anyway."""
    max_crashes: Positive = 3
    """Instances that end in a row before they are ready, after which the pool is given up: until one starts after all, or
    a person sets its size."""
    lost_s: PositiveSeconds = 90.0
    """Silence after which an instance whose process runs is stopped and replaced, seconds. If half of all members are
    silent, none is: rather this manager is cut off.
    """
    surplus_s: PositiveSeconds = 30.0
    """Time after which instances that nobody ordered count as wanted; they then go as the load permits."""
    max_records: Positive = 64
    """Decisions of a pool that are kept."""

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    name: str
    role: Role
    bounds: Bounds
    initial: int
    """Size to order first."""
    start_s: float
    """Usual time from an order until an instance is ready, where ``facts`` do not know it."""
    facts: Facts


@dataclass(slots=True)
class _Order:
    """The wanted size, as long as the pool does not have it."""

    number: int
    due_s: float = 0.0
    attempt: int = 1


class PoolMachine:
    """Owner of the size that one pool should have.

    It records, but does not order, what ``acting`` excludes.
    """

    def __init__(
        self,
        settings: PoolSettings,
        reports: RouterReports,
        *,
        scaling: ScalingLimits,
        limits: PoolLimits,
        now_s: float,
        acting: Acting = Acting.ALL,
    ) -> None:
        """``reports`` are those of all routers of the pool's model; they are only read."""
        self._settings = settings
        self._scaling = scaling
        self._limits = limits
        self._acting = acting
        self._demand = Demand(settings.role, settings.facts, reports)
        self._log = DecisionLog(limits.max_records)
        self._wanted = settings.initial
        self._instances: tuple[PoolInstance, ...] = ()
        self._roles = RolesSeen(0, None)
        self._planned: PlannedSize | None = None
        self._order: _Order | None = None
        self._draining = ""
        self._drain_due_s = 0.0
        self._override_size: int | None = None
        self._override_until_s = 0.0
        self._grown_s: float | None = None
        self._changes: deque[float] = deque()
        self._next_period_s = now_s + scaling.period_s
        self._low_periods = 0
        self._is_shrinking = False
        """The period that is due has permitted a smaller pool, and goes on until nothing more is given up."""
        self._futile = 0
        self._share_before: float | None = None
        """Attainment before the last growth for attainment alone; None once its effect was judged."""
        self._crashes = 0
        self._given_up = ""
        self._frozen = ""
        self._fault = ""
        self._refused = ""
        """Why the scaler did not accept the last order."""
        self._declared = True
        """The size was ordered by this manager since it leads."""
        self._surplus_since_s: float | None = None
        self._cut_off = False
        self._view: PoolView | None = None
        """View that the last decision was made from."""
        self._decision: Decision | None = None

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: PoolEvent, now_s: float) -> list[PoolEffect]:
        match event:
            case PoolTick():
                return self._tick(now_s)
            case InstancesSeen(instances, cut_off):
                self._cut_off = cut_off
                return self._seen(instances, now_s)
            case RolesSeen():
                self._roles = event
            case Noted():
                return self._noted(event, now_s)
            case SizePlanned(planned):
                self._planned = planned
            case StartFailed(reason):
                return self._start_failed(reason, now_s)
            case Frozen(reason):
                self._frozen = reason
            case OverrideSet(size, for_s):
                self._override_set(size, now_s + for_s, now_s)
            case OverrideEnded():
                self._override_size = None
            case OrderTaken() | OrderFailed():
                self._answered(event)
            case PoolResumed(kept, records):
                return self._resumed(kept, records, now_s)
        return []

    def _override_set(self, size: int, until_s: float, now_s: float) -> None:
        self._override_size, self._override_until_s = size, until_s
        self._crashes, self._given_up = 0, ""
        if self._order is not None and self._order.attempt > 1:  # a person wants another attempt now
            self._order.attempt, self._order.due_s = 0, now_s

    def _answered(self, answer: OrderTaken | OrderFailed) -> None:
        if self._order is None or self._order.number == answer.number:
            self._refused = f"the scaler failed: {answer.reason}" if isinstance(answer, OrderFailed) else ""

    def _resumed(self, kept: SavedPool | None, records: tuple[DecisionRecord, ...], now_s: float) -> list[PoolEffect]:
        self._declared, self._refused = False, ""
        if kept is None:
            return []
        least = 0 if self._acting.advisory else self._settings.bounds.least
        self._wanted, self._given_up = max(least, kept.wanted), kept.given_up
        self._order, self._draining, self._fault = None, "", ""
        self._changes = deque(now_s - age_s for age_s in sorted(kept.changes_s, reverse=True))
        self._override_size = None
        if kept.override is not None:
            self._override_size, self._override_until_s = kept.override.size, now_s + kept.override.left_s
        if records:
            self._log.resume(records, dict(kept.decisions_s), now_s)
        return [RecordDecision(record) for record in self._log.replace_pending("by a later leader")]

    def _seen(self, instances: tuple[PoolInstance, ...], now_s: float) -> list[PoolEffect]:
        ready = {instance.instance_id for instance in self._instances if instance.phase is InstancePhase.READY}
        self._instances = instances
        present = self._count(InstancePhase.READY, InstancePhase.STARTING)
        if not self._acts(now_s):  # somebody else decides
            self._wanted = present
        elif not self._declared:  # nothing that is there is to be lost
            self._wanted = max(self._wanted, present)
        if any(instance.phase is InstancePhase.READY and instance.instance_id not in ready for instance in instances):
            self._crashes, self._given_up = 0, ""
        return [*self._drained(now_s), *self._arrived()]

    def _acts(self, now_s: float) -> bool:
        """Whether the size is ordered here: always, or as long as it was set by hand."""
        return not self._acting.advisory or (
            self._acting is Acting.MANUAL
            and (self._override(now_s) is not None or self._order is not None or bool(self._draining))
        )

    def _drained(self, now_s: float) -> list[PoolEffect]:
        """Order the size once the instance that was to drain has finished."""
        if not self._draining:
            return []
        finishes = any(
            instance.instance_id == self._draining and instance.phase is not InstancePhase.DRAINED
            for instance in self._instances
        )
        if finishes and now_s < self._drain_due_s:
            return []
        name, self._draining = self._draining, ""
        text = f"{name} has not drained in time" if finishes else f"{name} has drained"
        effects = self._ordered(text, now_s)
        return [*effects, RemoveInstance(name, text)] if finishes else effects

    def _removed(self, now_s: float) -> list[PoolEffect]:
        """Stop what has drained, also what a person or another leader has drained: it is replaced if the size wants it."""
        if not self._acts(now_s) or self._frozen or self._draining:
            return []
        effects: list[PoolEffect] = []
        for instance in self._instances:
            reason = ""
            if instance.phase is InstancePhase.DRAINED:
                reason = "it has drained"
            elif instance.phase is InstancePhase.DRAINING and instance.age_s >= self._limits.drain_timeout_s:
                reason = "it has not drained in time"
            elif instance.phase is InstancePhase.LOST and instance.age_s >= self._limits.lost_s and not self._cut_off:
                reason = f"it runs, but has not been heard of for {instance.age_s:.0f} s"
            if reason:
                effects.append(RemoveInstance(instance.instance_id, reason))
        return effects

    def _arrived(self) -> list[PoolEffect]:
        """Close the open order if the pool has its size."""
        if self._order is None or self._count(InstancePhase.READY) < self._wanted or self._draining:
            return []
        self._fault = self._refused = ""
        return self._closed(DecisionOutcome.DONE)

    def _surplus(self, now_s: float) -> list[PoolEffect]:
        """Instances that nobody ordered, one that was lost and is back for example, are wanted after a while: so decided upon."""
        ready = self._count(InstancePhase.READY)
        idle = self._frozen or not self._acts(now_s)
        if ready <= self._wanted or self._order is not None or self._draining or idle:
            self._surplus_since_s = None
            return []
        if self._surplus_since_s is None:
            self._surplus_since_s = now_s
        if now_s - self._surplus_since_s < self._limits.surplus_s:
            return []
        before, self._wanted = self._wanted, ready
        return self._ordered(f"{ready} instances are ready, {before} were ordered", now_s)

    def _start_failed(self, reason: str, now_s: float) -> list[PoolEffect]:
        self._crashes += 1
        if self._crashes < self._limits.max_crashes or self._given_up:
            return []
        self._given_up = f"{self._crashes} instances in a row ended before they were ready: {reason}"
        self._wanted = max(self._count(InstancePhase.READY), min(self._wanted, self._settings.bounds.least))
        effects = self._closed(DecisionOutcome.FAILED, self._given_up)
        if self._acts(now_s) and not self._frozen:
            effects.append(ScaleTo(self._wanted, self._log.next_number(), self._given_up))
        return effects

    # --- deciding ----------------------------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> list[PoolEffect]:
        while self._changes and self._changes[0] <= now_s - _HOUR_S:
            self._changes.popleft()
        effects = [
            *self._ended(now_s),
            *self._drained(now_s),
            *self._overdue(now_s),
            *self._surplus(now_s),
            *self._removed(now_s),
        ]
        view = self._view = self._viewed(now_s)
        decision = decide(view, self._scaling)
        effects += self._decided(view, decision, now_s)
        self._is_shrinking = self._order is not None and (self._is_shrinking or decision.why is Why.LOW_LOAD)
        if view.period_due and not self._is_shrinking:
            self._next_period_s = now_s + self._scaling.period_s
            self._low_periods = self._low_periods + 1 if decision.low else 0
            self._demand.begin_period()
        if not decision.breach:
            self._futile = 0
        return effects

    def _viewed(self, now_s: float) -> PoolView:
        view = PoolView(
            pool=self._settings.name,
            wanted=self._wanted,
            bounds=self._settings.bounds,
            instances=tuple(replace(instance, phase=self._phase(instance)) for instance in self._instances),
            start_s=self._settings.start_s,
            override=self._override(now_s),
            planned=self._planned,
            frozen=self._frozen or self._given_up,
            since_growth_s=None if self._grown_s is None else now_s - self._grown_s,
            changes_last_hour=len(self._changes),
            period_due=now_s >= self._next_period_s,
            low_periods=self._low_periods,
            switched=self._roles.switched,
            since_switch_s=self._roles.since_switch_s,
            tiers=self._roles.tiers,
        )
        view = self._demand.observe(view, now_s)
        self._judge_growth(view)
        return replace(view, futile_growths=self._futile)

    def _judge_growth(self, view: PoolView) -> None:
        """Whether the last growth for attainment alone has helped, once it can show."""
        if self._share_before is None or view.since_growth_s is None:
            return
        if view.since_growth_s < view.start_s + self._scaling.settle_s:
            return
        share = view.attainment.attainment
        self._futile = 0 if share is None or share > self._share_before + _IMPROVEMENT else self._futile + 1
        self._share_before = None

    def _decided(self, view: PoolView, decision: Decision, now_s: float) -> list[PoolEffect]:
        before, self._decision = self._decision, decision
        changed = decision.target != self._wanted
        advised = self._acting.advisory and not (self._acting is Acting.MANUAL and decision.why is Why.OVERRIDE)
        if (advised or not changed) and before is not None and _news(before) == _news(decision):
            return []
        number = self._log.next_number()
        outcome = DecisionOutcome.PENDING if changed else DecisionOutcome.DONE
        if advised and changed:
            outcome = DecisionOutcome.ADVISED
        record = DecisionRecord(number, view, decision, outcome)
        self._log.add(record, now_s)
        change = self._change(view, decision, number, now_s) if changed and not advised else []
        return [RecordDecision(record), *change]

    def _noted(self, noted: Noted, now_s: float) -> list[PoolEffect]:
        """Record a decision that leaves the size as it is."""
        if self._view is None:
            return []
        outcome = DecisionOutcome.ADVISED if noted.advised else DecisionOutcome.DONE
        decision = Decision(self._wanted, (Reason(noted.why, noted.reason),))
        record = DecisionRecord(self._log.next_number(), replace(self._view, wanted=self._wanted), decision, outcome)
        self._log.add(record, now_s)
        return [RecordDecision(record)]

    def _change(self, view: PoolView, decision: Decision, number: int, now_s: float) -> list[PoolEffect]:
        effects = self._closed(DecisionOutcome.REPLACED, f"by {number}")
        reason = decision.reasons[0].text
        grows = decision.target > self._wanted
        if grows:
            self._grown_s = now_s
            self._share_before = view.attainment.attainment if decision.why is Why.BREACH else None
        self._wanted = decision.target
        if decision.why not in (Why.OVERRIDE, Why.PLAN):
            self._changes.append(now_s)
        self._order = _Order(number)
        if decision.drain and not grows:
            self._draining, self._drain_due_s = decision.drain, now_s + self._limits.drain_timeout_s
            return [*effects, DrainInstance(decision.drain, number, reason)]
        return [*effects, *self._ordered(reason, now_s)]

    def _ordered(self, reason: str, now_s: float) -> list[PoolEffect]:
        """Order the wanted size, perhaps again."""
        if self._order is None:
            self._order = _Order(self._log.next_number())
        start_s = self._settings.start_s if self._view is None else self._view.start_s
        self._order.due_s = now_s + self._limits.order_starts * start_s * 2 ** (self._order.attempt - 1)
        return [ScaleTo(self._wanted, self._order.number, reason)]

    def _ended(self, now_s: float) -> list[PoolEffect]:
        """Close the order of a size by hand that has ended, if decisions are only recorded."""
        if not self._acting.advisory or self._draining or self._override(now_s) is not None:
            return []
        return self._closed(DecisionOutcome.REPLACED, "the size by hand has ended")

    def _overdue(self, now_s: float) -> list[PoolEffect]:
        """Repeat an order that is not fulfilled, also one of a pool that has lost instances."""
        if not self._acts(now_s) or self._frozen or self._given_up or self._draining:
            return []
        ready = self._count(InstancePhase.READY)
        if not self._declared:
            self._declared = True
            return self._ordered("this manager leads from now on", now_s)
        if self._order is None:
            if ready + self._count(InstancePhase.STARTING) >= self._wanted:
                return []
            return self._ordered(f"{ready} of {self._wanted} instances are there", now_s)
        if now_s < self._order.due_s:
            return []
        self._order.attempt = min(self._order.attempt + 1, 6)
        self._fault = f"{ready} of {self._wanted} instances are ready, although they were ordered long ago"
        late = self._outcome(self._order.number, DecisionOutcome.TIMED_OUT, self._fault)
        return [*late, *self._ordered("not fulfilled in time", now_s)]

    def _closed(self, outcome: DecisionOutcome, detail: str = "") -> list[PoolEffect]:
        """Close the open order, if there is one."""
        order, self._order = self._order, None
        return [] if order is None else self._outcome(order.number, outcome, detail)

    def _outcome(self, number: int, outcome: DecisionOutcome, detail: str) -> list[PoolEffect]:
        record = self._log.close(number, outcome, detail)
        return [] if record is None else [RecordDecision(record)]

    # --- readers -----------------------------------------------------------------------------------------------------

    def _count(self, *phases: InstancePhase) -> int:
        return sum(self._phase(instance) in phases for instance in self._instances)

    def _phase(self, instance: PoolInstance) -> InstancePhase:
        """Draining from the moment at which that was ordered."""
        ordered = instance.instance_id == self._draining and instance.phase is InstancePhase.READY
        return InstancePhase.DRAINING if ordered else instance.phase

    def _override(self, now_s: float) -> Override | None:
        if self._override_size is None or now_s >= self._override_until_s:
            return None
        return Override(self._override_size, self._override_until_s - now_s)

    def works(self, instance_id: str) -> bool:
        """Whether the instance is ready, and not draining."""
        return any(
            instance.instance_id == instance_id and self._phase(instance) is InstancePhase.READY
            for instance in self._instances
        )

    @property
    def wanted(self) -> int:
        return self._wanted

    @property
    def is_given_up(self) -> bool:
        """Whether no instance is started any more."""
        return bool(self._given_up)

    @property
    def view(self) -> PoolView | None:
        """View that the last decision was made from; None before the first."""
        return self._view

    def kept(self, now_s: float) -> SavedPool:
        """State that the next leader needs."""
        ages = tuple(now_s - at_s for at_s in self._changes)
        decisions = tuple((record.number, record.age_s) for record in self.records(now_s))
        return SavedPool(self._wanted, self._override(now_s), self._given_up, ages, decisions)

    def records(self, now_s: float) -> tuple[DecisionRecord, ...]:
        """The last decisions, oldest first."""
        return self._log.records(now_s)

    def status(self, now_s: float) -> ScalingStatus:
        return ScalingStatus(
            self._settings.name,
            self._state(),
            self._acting,
            self._wanted,
            self._count(InstancePhase.READY),
            self._count(InstancePhase.STARTING),
            self._count(InstancePhase.DRAINING, InstancePhase.DRAINED),
            self._settings.bounds,
            NOTHING_JUDGED if self._view is None else self._view.attainment,
            self._override(now_s),
            self._frozen or self._given_up or self._refused or self._fault,
            tuple(map(DecisionSummary.of, self.records(now_s)[-_SHOWN_DECISIONS:])),
            attainment_window_s=self._scaling.attainment_window_s,
        )

    def _state(self) -> PoolState:
        if self._frozen or self._given_up:
            return PoolState.FROZEN
        if self._decision is not None and self._decision.breach:
            return PoolState.BREACH
        if self._draining:
            return PoolState.SHRINKING
        return PoolState.GROWING if self._order is not None else PoolState.STEADY

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        name = self._settings.name
        if len(self._changes) > self._scaling.max_changes_per_hour:
            raise AssertionError(f"{name} has changed more often than its budget allows")
        if self._acting.advisory and self._acting is not Acting.MANUAL and (self._order is not None or self._draining):
            raise AssertionError(f"{name} has an order in advisory mode")


def _news(decision: Decision) -> tuple[object, ...]:
    """Change that is worth a record when nothing is ordered."""
    return decision.target, decision.why, decision.breach, decision.saturated, decision.sick, decision.missing != ()
