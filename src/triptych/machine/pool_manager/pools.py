"""The pools of one model: what routers report, what was decided, what was ordered, and what came of it.

``handle`` is the only mutator. A pool decides at each tick (``policy.scaling``), and orders sizes, not instances: the
scaler keeps the size, and replaces an instance that died.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from triptych.domain.decision import (
    Acting,
    Bounds,
    Decision,
    DecisionOutcome,
    DecisionRecord,
    DecisionSummary,
    InstancePhase,
    KeptPool,
    Override,
    PoolFacts,
    PoolInstance,
    PoolLoad,
    PoolState,
    PoolView,
    ScalingStatus,
    Why,
)
from triptych.domain.limits import Positive, PositiveSeconds, check_limits
from triptych.domain.slo import ChargedStage
from triptych.domain.stage import Role, Stage
from triptych.domain.windows import ClassWindow, Judged
from triptych.machine.pool_manager.pool_events import (
    DrainInstance,
    Frozen,
    InstancesSeen,
    OrderFailed,
    OrderTaken,
    OverrideEnded,
    OverrideSet,
    PoolEffect,
    PoolEvent,
    RecordDecision,
    RemoveInstance,
    Reported,
    Resumed,
    RouterGone,
    ScaleTo,
    StartFailed,
    Tick,
)
from triptych.machine.pool_manager.reports import BURST_S, LONG_S, SHORT_S, Dropped, RouterReports
from triptych.policy.scaling import ScalingLimits, decide, encode_tokens, prompt_tokens

_HOUR_S = 3600.0
_SHOWN_DECISIONS = 10
_IMPROVEMENT = 0.01
"""Attainment must rise by this much for a growth to count as an improvement."""

Facts = Callable[[Mapping[str, ClassWindow]], PoolFacts]
"""What the profile says of a pool under the mix of a window. Pure."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Patience with scalers and instances."""

    order_starts: PositiveSeconds = 3.0
    """An order is overdue after this multiple of the usual start time; it is then repeated, at growing distances."""
    drain_timeout_s: PositiveSeconds = 600.0
    """Time that a drained instance has; then the size is ordered anyway."""
    max_crashes: Positive = 3
    """Instances that end in a row before they are ready, after which the pool is given up: until one starts after all, or
    a person sets its size."""
    lost_s: PositiveSeconds = 90.0
    """An instance whose process runs, but that has not been heard of for this long, is stopped and replaced, unless that
    concerns half of all members: then rather this manager is cut off."""
    surplus_s: PositiveSeconds = 30.0
    """Time after which instances that nobody ordered count as wanted; they then go as the load permits."""
    max_records: Positive = 64
    """Decisions of a pool that are kept."""

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """One pool. ``role`` says which misses it is charged with, and which tokens are its load: of embeddings for instances
    that encode only, of prompts for all others.
    """

    name: str
    role: Role
    bounds: Bounds
    initial: int
    """Size to order first."""
    start_s: float
    """Usual time from an order until an instance is ready, where ``facts`` do not know it."""
    facts: Facts

    @property
    def stages(self) -> tuple[ChargedStage, ...]:
        """Whose misses it is charged with: an instance that encodes and prefills, with both."""
        named = ((Stage.ENCODE, ChargedStage.ENCODE), (Stage.PREFILL, ChargedStage.PREFILL))
        return tuple(charged for stage, charged in named if self.role.serves(stage))


@dataclass(slots=True)
class _Order:
    """A size that the pool does not have yet."""

    number: int
    size: int
    due_s: float
    attempt: int = 1


@dataclass(slots=True)
class _Recorded:
    at_s: float
    record: DecisionRecord


@dataclass(slots=True)
class _Pool:
    settings: PoolSettings
    wanted: int
    next_period_s: float
    instances: tuple[PoolInstance, ...] = ()
    order: _Order | None = None
    draining: str = ""
    drain_due_s: float = 0.0
    override_size: int | None = None
    override_until_s: float = 0.0
    grown_s: float | None = None
    changes: deque[float] = field(default_factory=deque)
    low_periods: int = 0
    peak_per_s: float = 0.0
    futile: int = 0
    share_before: float | None = None
    """Attainment before the last growth for attainment alone; None once its effect was judged."""
    crashes: int = 0
    given_up: str = ""
    fault: str = ""
    refused: str = ""
    """Why the scaler did not accept the last order."""
    declared: bool = True
    """The size was ordered by this manager since it leads."""
    surplus_since_s: float | None = None
    cut_off: bool = False
    records: deque[_Recorded] = field(default_factory=deque)
    view: PoolView | None = None
    """What the last decision was made from."""
    decision: Decision | None = None
    facts: PoolFacts | None = None
    """The last ones with a capacity."""
    start_s: float = 0.0
    """Usual time from an order until an instance is ready."""
    attainment: Judged = Judged(0, 0)  # noqa: RUF009 - immutable

    def count(self, *phases: InstancePhase) -> int:
        return sum(self.phase(one) in phases for one in self.instances)

    def phase(self, one: PoolInstance) -> InstancePhase:
        """Draining from the moment at which that was ordered."""
        ordered = one.instance_id == self.draining and one.phase is InstancePhase.READY
        return InstancePhase.DRAINING if ordered else one.phase

    def override(self, now_s: float) -> Override | None:
        if self.override_size is None or now_s >= self.override_until_s:
            return None
        return Override(self.override_size, self.override_until_s - now_s)


class PoolsMachine:
    """The pools of one model. With ``advisory`` decisions are recorded only; with ``manual`` as well, sizes that were set by
    hand are ordered nevertheless.
    """

    def __init__(
        self,
        pools: tuple[PoolSettings, ...],
        *,
        scaling: ScalingLimits,
        limits: PoolLimits,
        now_s: float,
        advisory: bool = False,
        manual: bool = False,
    ) -> None:
        self._manual = manual
        self._scaling = scaling
        self._limits = limits
        self._advisory = advisory
        self._acting = (Acting.MANUAL if manual else Acting.NONE) if advisory else Acting.ALL
        self._reports = RouterReports(attainment_s=scaling.attainment_window_s)
        self._numbers = count(1)
        self._frozen = ""
        self._dropped: dict[Dropped, int] = {}
        self._pools = {
            one.name: _Pool(one, one.initial, now_s + scaling.period_s, start_s=one.start_s) for one in pools
        }

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: PoolEvent, now_s: float) -> list[PoolEffect]:
        """An event about an unknown pool has no effect."""
        match event:
            case Reported(router, report):
                if (dropped := self._reports.accept(router, report, now_s)) is not None:
                    self._dropped[dropped] = self._dropped.get(dropped, 0) + 1
            case RouterGone(router):
                self._reports.forget(router)
            case Frozen(reason):
                self._frozen = reason
            case Tick():
                return [effect for pool in self._pools.values() for effect in self._tick(pool, now_s)]
            case _:
                pool = self._pools.get(event.pool)
                return [] if pool is None else self._of_pool(pool, event, now_s)
        return []

    def _of_pool(
        self,
        pool: _Pool,
        event: InstancesSeen | StartFailed | OverrideSet | OverrideEnded | OrderFailed | OrderTaken | Resumed,
        now_s: float,
    ) -> list[PoolEffect]:
        match event:
            case InstancesSeen(_, instances, cut_off):
                pool.cut_off = cut_off
                return self._seen(pool, instances, now_s)
            case StartFailed(_, reason):
                return self._start_failed(pool, reason, now_s)
            case OverrideSet(_, size, for_s):
                pool.override_size, pool.override_until_s = size, now_s + for_s
                pool.crashes, pool.given_up = 0, ""
                if pool.order is not None and pool.order.attempt > 1:  # a person wants another attempt now
                    pool.order.attempt, pool.order.due_s = 0, now_s
            case OverrideEnded():
                pool.override_size = None
            case OrderFailed(_, number, reason):
                if pool.order is None or pool.order.number == number:
                    pool.refused = f"the scaler failed: {reason}"
            case OrderTaken(_, number):
                if pool.order is None or pool.order.number == number:
                    pool.refused = ""
            case Resumed(_, kept, records):
                self._resumed(pool, kept, records, now_s)
        return []

    def _resumed(self, pool: _Pool, kept: KeptPool | None, records: tuple[DecisionRecord, ...], now_s: float) -> None:
        pool.declared, pool.refused = False, ""
        if kept is None:
            return
        least = 0 if self._advisory else pool.settings.bounds.least
        pool.wanted, pool.given_up = max(least, kept.wanted), kept.given_up
        pool.order, pool.draining, pool.fault = None, "", ""
        pool.changes = deque(now_s - age_s for age_s in sorted(kept.changes_s, reverse=True))
        pool.override_size = None
        if kept.override is not None:
            pool.override_size, pool.override_until_s = kept.override.size, now_s + kept.override.left_s
        if records:
            ages_s = dict(kept.decisions_s)
            last = records[-self._limits.max_records :]
            pool.records = deque(_Recorded(now_s - ages_s.get(one.number, 0.0), one) for one in last)
            self._numbers = count(1 + max(one.number for one in records))

    def _seen(self, pool: _Pool, instances: tuple[PoolInstance, ...], now_s: float) -> list[PoolEffect]:
        ready = {one.instance_id for one in pool.instances if one.phase is InstancePhase.READY}
        pool.instances = instances
        present = pool.count(InstancePhase.READY, InstancePhase.STARTING)
        if not self._acts(pool, now_s):  # somebody else decides
            pool.wanted = present
        elif not pool.declared:  # nothing that is there is to be lost
            pool.wanted = max(pool.wanted, present)
        if any(one.phase is InstancePhase.READY and one.instance_id not in ready for one in instances):
            pool.crashes, pool.given_up = 0, ""
        return [*self._drained(pool, now_s), *self._arrived(pool)]

    def _acts(self, pool: _Pool, now_s: float) -> bool:
        """Whether the size is ordered here: always, or as long as it was set by hand."""
        return not self._advisory or (
            self._manual and (pool.override(now_s) is not None or pool.order is not None or bool(pool.draining))
        )

    def _drained(self, pool: _Pool, now_s: float) -> list[PoolEffect]:
        """Order the size once the instance that was to drain has finished."""
        if not pool.draining:
            return []
        finishes = any(
            one.instance_id == pool.draining and one.phase is not InstancePhase.DRAINED for one in pool.instances
        )
        if finishes and now_s < pool.drain_due_s:
            return []
        name, pool.draining = pool.draining, ""
        what = f"{name} has not drained in time" if finishes else f"{name} has drained"
        effects = self._ordered(pool, what, now_s)
        return [*effects, RemoveInstance(pool.settings.name, name, what)] if finishes else effects

    def _removed(self, pool: _Pool, now_s: float) -> list[PoolEffect]:
        """Stop what has drained, also what a person or another leader has drained: it is replaced if the size wants it."""
        if not self._acts(pool, now_s) or self._frozen or pool.draining:
            return []
        effects: list[PoolEffect] = []
        for one in pool.instances:
            reason = ""
            if one.phase is InstancePhase.DRAINED:
                reason = "it has drained"
            elif one.phase is InstancePhase.DRAINING and one.age_s >= self._limits.drain_timeout_s:
                reason = "it has not drained in time"
            elif one.phase is InstancePhase.LOST and one.age_s >= self._limits.lost_s and not pool.cut_off:
                reason = f"it runs, but has not been heard of for {one.age_s:.0f} s"
            if reason:
                effects.append(RemoveInstance(pool.settings.name, one.instance_id, reason))
        return effects

    def _arrived(self, pool: _Pool) -> list[PoolEffect]:
        """Close the open order if the pool has its size."""
        if pool.order is None or pool.count(InstancePhase.READY) < pool.order.size or pool.draining:
            return []
        number, pool.order, pool.fault, pool.refused = pool.order.number, None, "", ""
        return self._outcome(pool, number, DecisionOutcome.DONE, "")

    def _surplus(self, pool: _Pool, now_s: float) -> list[PoolEffect]:
        """Instances that nobody ordered, one that was lost and is back for example, are wanted after a while: so decided upon."""
        ready = pool.count(InstancePhase.READY)
        idle = self._frozen or not self._acts(pool, now_s)
        if ready <= pool.wanted or pool.order is not None or pool.draining or idle:
            pool.surplus_since_s = None
            return []
        if pool.surplus_since_s is None:
            pool.surplus_since_s = now_s
        if now_s - pool.surplus_since_s < self._limits.surplus_s:
            return []
        before, pool.wanted = pool.wanted, ready
        return self._ordered(pool, f"{ready} instances are ready, {before} were ordered", now_s)

    def _start_failed(self, pool: _Pool, reason: str, now_s: float) -> list[PoolEffect]:
        pool.crashes += 1
        if pool.crashes < self._limits.max_crashes or pool.given_up:
            return []
        pool.given_up = f"{pool.crashes} instances in a row ended before they were ready: {reason}"
        pool.wanted = max(pool.count(InstancePhase.READY), min(pool.wanted, pool.settings.bounds.least))
        effects: list[PoolEffect] = []
        if pool.order is not None:
            number, pool.order = pool.order.number, None
            effects = self._outcome(pool, number, DecisionOutcome.FAILED, pool.given_up)
        if self._acts(pool, now_s) and not self._frozen:
            effects.append(ScaleTo(pool.settings.name, pool.wanted, next(self._numbers), pool.given_up))
        return effects

    # --- deciding ----------------------------------------------------------------------------------------------------

    def _tick(self, pool: _Pool, now_s: float) -> list[PoolEffect]:
        while pool.changes and pool.changes[0] <= now_s - _HOUR_S:
            pool.changes.popleft()
        effects = [
            *self._ended(pool, now_s),
            *self._drained(pool, now_s),
            *self._overdue(pool, now_s),
            *self._surplus(pool, now_s),
            *self._removed(pool, now_s),
        ]
        view = pool.view = self._view(pool, now_s)
        decision = decide(view, self._scaling)
        effects += self._decided(pool, view, decision, now_s)
        if view.period_due:
            pool.next_period_s = now_s + self._scaling.period_s
            pool.low_periods = pool.low_periods + 1 if decision.low else 0
            pool.peak_per_s = 0.0
        if not decision.breach:
            pool.futile = 0
        return effects

    def _view(self, pool: _Pool, now_s: float) -> PoolView:
        reports, settings = self._reports, pool.settings
        pool.attainment = reports.attainment(settings.stages, now_s)
        facts = self._facts(pool, now_s)
        missing = facts.missing
        if uncharged := reports.uncharged(now_s):
            missing += (f"isolated latencies: {uncharged} missed TTFTs are charged to no stage",)
        load = self._load(pool, facts.wait_objective_s or 0.0, now_s)
        if load is not None:
            pool.peak_per_s = load.peak_per_s
        self._judge_growth(pool, now_s)
        judged = reports.instances(now_s)
        return PoolView(
            pool=settings.name,
            wanted=pool.wanted,
            bounds=settings.bounds,
            instances=tuple(
                replace(one, phase=pool.phase(one), judged=judged.get(one.instance_id, Judged()))
                for one in pool.instances
            ),
            load=load,
            report_age_s=reports.age_s(now_s),
            capacity_per_s=facts.capacity_per_s,
            wait_objective_s=facts.wait_objective_s,
            attainment=pool.attainment,
            missing=missing,
            start_s=pool.start_s,
            override=pool.override(now_s),
            frozen=self._frozen or pool.given_up,
            since_growth_s=None if pool.grown_s is None else now_s - pool.grown_s,
            changes_last_hour=len(pool.changes),
            period_due=now_s >= pool.next_period_s,
            low_periods=pool.low_periods,
            futile_growths=pool.futile,
        )

    def _facts(self, pool: _Pool, now_s: float) -> PoolFacts:
        """Under the mix of the last 30 s, else of the last 300 s; a pool without requests has its last capacity."""
        classes = self._reports.classes(SHORT_S, now_s)
        facts = pool.settings.facts(classes)
        if facts.capacity_per_s is None:
            classes = self._reports.classes(LONG_S, now_s)
            facts = pool.settings.facts(classes)
        pool.start_s = pool.settings.start_s if facts.start_s is None else facts.start_s
        if facts.capacity_per_s is not None:
            pool.facts = facts
        elif pool.facts is not None and not any(one.arrivals for one in classes.values()):
            return pool.facts
        return facts

    def _load(self, pool: _Pool, patience_s: float, now_s: float) -> PoolLoad | None:
        stages, reports = pool.settings.stages, self._reports
        tokens = encode_tokens if stages == (ChargedStage.ENCODE,) else prompt_tokens
        short = reports.per_s(SHORT_S, now_s, tokens)
        if short is None:
            return None
        burst = reports.per_s(BURST_S, now_s, tokens) or 0.0
        absorbed = burst * BURST_S / (BURST_S + patience_s)  # what waits no longer than that is served meanwhile
        return PoolLoad(
            burst_per_s=burst,
            short_per_s=short,
            long_per_s=reports.per_s(LONG_S, now_s, tokens) or 0.0,
            peak_per_s=max(pool.peak_per_s, short, absorbed),
            waiting=reports.waiting(stages, now_s),
            coverage=reports.coverage(now_s),
            announced=0.0 if ChargedStage.ENCODE in stages else reports.announced(now_s),
        )

    def _judge_growth(self, pool: _Pool, now_s: float) -> None:
        """Whether the last growth for attainment alone has helped, once it can show."""
        if pool.share_before is None or pool.grown_s is None:
            return
        if now_s - pool.grown_s < pool.start_s + self._scaling.settle_s:
            return
        share = pool.attainment.attainment
        pool.futile = 0 if share is None or share > pool.share_before + _IMPROVEMENT else pool.futile + 1
        pool.share_before = None

    def _decided(self, pool: _Pool, view: PoolView, decision: Decision, now_s: float) -> list[PoolEffect]:
        before, pool.decision = pool.decision, decision
        changed = decision.target != pool.wanted
        advised = self._advisory and not (self._manual and decision.why is Why.OVERRIDE)
        if (advised or not changed) and before is not None and _news(before) == _news(decision):
            return []
        number = next(self._numbers)
        outcome = DecisionOutcome.PENDING if changed else DecisionOutcome.DONE
        if advised and changed:
            outcome = DecisionOutcome.ADVISED
        effects = self._record(pool, DecisionRecord(number, view, decision, outcome), now_s)
        if not changed or advised:
            return effects
        return effects + self._change(pool, decision, number, now_s)

    def _change(self, pool: _Pool, decision: Decision, number: int, now_s: float) -> list[PoolEffect]:
        effects: list[PoolEffect] = []
        reason = decision.reasons[0].text
        grows = decision.target > pool.wanted
        if pool.order is not None:
            effects += self._outcome(pool, pool.order.number, DecisionOutcome.REPLACED, f"by {number}")
        if grows:
            pool.grown_s = now_s
            alone = decision.why is Why.BREACH
            pool.share_before = pool.attainment.attainment if alone else None
        pool.wanted = decision.target
        if decision.why is not Why.OVERRIDE:
            pool.changes.append(now_s)
        start_s = self._limits.order_starts * pool.start_s
        pool.order = _Order(number, decision.target, now_s + start_s)
        if decision.drain and not grows:
            pool.draining, pool.drain_due_s = decision.drain, now_s + self._limits.drain_timeout_s
            pool.order.due_s = max(pool.order.due_s, pool.drain_due_s)
            return [*effects, DrainInstance(pool.settings.name, decision.drain, number, reason)]
        return [*effects, ScaleTo(pool.settings.name, decision.target, number, reason)]

    def _ordered(self, pool: _Pool, reason: str, now_s: float) -> list[PoolEffect]:
        """Order the present size again."""
        start_s = self._limits.order_starts * pool.start_s
        if pool.order is None:
            pool.order = _Order(next(self._numbers), pool.wanted, now_s + start_s)
        pool.order.due_s = now_s + start_s * 2 ** (pool.order.attempt - 1)
        return [ScaleTo(pool.settings.name, pool.wanted, pool.order.number, reason)]

    def _ended(self, pool: _Pool, now_s: float) -> list[PoolEffect]:
        """Close the order of a size by hand that has ended, if decisions are only recorded."""
        if not self._advisory or pool.order is None or pool.draining or pool.override(now_s) is not None:
            return []
        number, pool.order = pool.order.number, None
        return self._outcome(pool, number, DecisionOutcome.REPLACED, "the size by hand has ended")

    def _overdue(self, pool: _Pool, now_s: float) -> list[PoolEffect]:
        """Repeat an order that is not fulfilled, also one of a pool that has lost instances."""
        if not self._acts(pool, now_s) or self._frozen or pool.given_up or pool.draining:
            return []
        ready = pool.count(InstancePhase.READY)
        if not pool.declared:
            pool.declared = True
            return self._ordered(pool, "this manager leads from now on", now_s)
        if pool.order is None:
            if ready + pool.count(InstancePhase.STARTING) >= pool.wanted:
                return []
            return self._ordered(pool, f"{ready} of {pool.wanted} instances are there", now_s)
        if now_s < pool.order.due_s:
            return []
        pool.order.attempt = min(pool.order.attempt + 1, 6)
        pool.fault = f"{ready} of {pool.wanted} instances are ready, although they were ordered long ago"
        late = self._outcome(pool, pool.order.number, DecisionOutcome.TIMED_OUT, pool.fault)
        return [*late, *self._ordered(pool, "not fulfilled in time", now_s)]

    # --- records -----------------------------------------------------------------------------------------------------

    def _record(self, pool: _Pool, record: DecisionRecord, now_s: float) -> list[PoolEffect]:
        pool.records.append(_Recorded(now_s, record))
        while len(pool.records) > self._limits.max_records:
            pool.records.popleft()
        return [RecordDecision(record)]

    def _outcome(self, pool: _Pool, number: int, outcome: DecisionOutcome, detail: str) -> list[PoolEffect]:
        for one in pool.records:
            open_ = one.record.outcome in (DecisionOutcome.PENDING, DecisionOutcome.TIMED_OUT)
            if one.record.number == number and open_:
                one.record = replace(one.record, outcome=outcome, detail=detail)
                return [RecordDecision(one.record)]
        return []

    # --- readers -----------------------------------------------------------------------------------------------------

    def works(self, pool: str, instance_id: str) -> bool:
        """Whether the instance is ready, and not draining."""
        one = self._pools[pool]
        return any(it.instance_id == instance_id and one.phase(it) is InstancePhase.READY for it in one.instances)

    def wanted(self, pool: str) -> int:
        return self._pools[pool].wanted

    def mix(self, now_s: float) -> Mapping[str, ClassWindow]:
        """What arrived in the last 300 s, by class."""
        return self._reports.classes(LONG_S, now_s)

    def view(self, pool: str) -> PoolView | None:
        """What the last decision on it was made from; None before the first."""
        return self._pools[pool].view

    def kept(self, pool: str, now_s: float) -> KeptPool:
        """What the next leader needs to know."""
        one = self._pools[pool]
        ages = tuple(now_s - at_s for at_s in one.changes)
        decisions = tuple((record.number, record.age_s) for record in self.records(pool, now_s))
        return KeptPool(one.wanted, one.override(now_s), one.given_up, ages, decisions)

    @property
    def dropped(self) -> Mapping[Dropped, int]:
        """Reports that were not counted, by the reason."""
        return self._dropped

    def records(self, pool: str, now_s: float) -> tuple[DecisionRecord, ...]:
        """The last decisions on a pool, oldest first; empty for an unknown one."""
        found = self._pools.get(pool)
        return () if found is None else tuple(replace(one.record, age_s=now_s - one.at_s) for one in found.records)

    def status(self, now_s: float) -> tuple[ScalingStatus, ...]:
        return tuple(
            ScalingStatus(
                name,
                self._state(pool),
                self._acting,
                pool.wanted,
                pool.count(InstancePhase.READY),
                pool.count(InstancePhase.STARTING),
                pool.count(InstancePhase.DRAINING, InstancePhase.DRAINED),
                pool.settings.bounds,
                pool.attainment,
                pool.override(now_s),
                self._frozen or pool.given_up or pool.refused or pool.fault,
                tuple(map(DecisionSummary.of, self.records(name, now_s)[-_SHOWN_DECISIONS:])),
                attainment_window_s=self._scaling.attainment_window_s,
            )
            for name, pool in self._pools.items()
        )

    def _state(self, pool: _Pool) -> PoolState:
        if self._frozen or pool.given_up:
            return PoolState.FROZEN
        if pool.decision is not None and pool.decision.breach:
            return PoolState.BREACH
        if pool.draining:
            return PoolState.SHRINKING
        return PoolState.GROWING if pool.order is not None else PoolState.STEADY

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self._reports.validate()
        for name, pool in self._pools.items():
            if len(pool.changes) > self._scaling.max_changes_per_hour:
                raise AssertionError(f"{name} has changed more often than its budget allows")
            if self._advisory and not self._manual and (pool.order is not None or pool.draining):
                raise AssertionError(f"{name} has an order in advisory mode")
            if pool.order is not None and pool.order.size != pool.wanted:
                raise AssertionError(f"the order of {name} is not of the wanted size")
            if len(pool.records) > self._limits.max_records:
                raise AssertionError(f"{name} keeps more records than allowed")


def _news(decision: Decision) -> tuple[object, ...]:
    """What is worth a record when nothing is ordered."""
    return decision.target, decision.why, decision.breach, decision.saturated, decision.sick, decision.missing != ()
