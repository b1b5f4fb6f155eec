"""Keeps pools at the size that is decided: feeds the machines of pools, and carries out what they order."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from triptych.domain.decision import (
    Acting,
    Bounds,
    DecisionRecord,
    InstancePhase,
    Override,
    PoolInstance,
    SavedPool,
    ScalingStatus,
    TierShare,
    Why,
)
from triptych.domain.pool import ManualSize, MemberCondition, MemberStatus, PoolStatus, Registration
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.domain.tier import Tier
from triptych.domain.windows import ClassWindow, WindowReport
from triptych.errors import InvalidRequest, NotFound, Unavailable
from triptych.machine.pool_manager.demand import Facts
from triptych.machine.pool_manager.pool import PoolLimits, PoolMachine, PoolSettings
from triptych.machine.pool_manager.pool_events import (
    DrainInstance,
    Frozen,
    InstancesSeen,
    Noted,
    OverrideEnded,
    OverrideSet,
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
from triptych.machine.pool_manager.reports import LONG_S, SHORT_S, RouterReports
from triptych.machine.pool_manager.rolling import RollMachine
from triptych.machine.pool_manager.stage_views import stage_views, switched
from triptych.machine.pool_manager.starting import StartingInstances
from triptych.machine.pool_manager.switching import SwitchMachine
from triptych.policy.moving import PoolSize
from triptych.policy.scaling import ScalingLimits
from triptych.policy.sizing import DegreeChange
from triptych.policy.switching import SwitchLimits
from triptych.policy.tiers import TierView, shares
from triptych.ports import Clock, Scaler, Store
from triptych.runtime.tasks import TaskScope
from triptych.store.leadership import LeaseTimes

from .batch_limits import BatchDecisions
from .leading import Leading
from .limits import ControlLimits
from .orders import Orders
from .replanning import Replanning
from .rolls import Rolls
from .scaler_view import ScalerView

logger = logging.getLogger(__name__)

_MAX_POOLS = 256
_DEGREES_S = 300.0
"""Between two decisions on the degree of a pool: under the mix of so long."""
_GONE_S = 60.0
"""A pool without members, of which the scaler knows nothing either, is forgotten after this long."""
_PHASES = {
    MemberCondition.ACTIVE: InstancePhase.READY,
    MemberCondition.LEAVING: InstancePhase.DRAINING,
    MemberCondition.DRAINED: InstancePhase.DRAINED,
}


@dataclass(slots=True)
class ControlledPool:
    name: PoolName
    machine: PoolMachine
    orders: Orders
    found_s: float
    seen_s: float
    starting: StartingInstances = field(default_factory=StartingInstances)
    tier: Tier | None = None
    """As its last instances said; None without tiers."""
    roll: RollMachine | None = None
    """None unless its instances get another tensor-parallel degree."""
    start_failures: int = 0


class Control:
    """Control of the pools: one ``PoolMachine`` per pool, over the reports of its model.

    Only the manager that leads orders anything, under the fence of its lease. Pools are those that have members, and
    those of which the scaler knows instances. ``acting`` says which sizes are carried out.
    """

    def __init__(
        self,
        limits: ControlLimits,
        *,
        scaling: ScalingLimits,
        pool_limits: PoolLimits,
        lease: LeaseTimes,
        owner: str,
        store: Store,
        scaler: Scaler,
        scaler_at: str,
        acting: Acting,
        drain: Callable[[str, str], None],
        switching: SwitchLimits | None,
        switch: Callable[[str, Role, str], None],
        clock: Clock,
        scope: TaskScope,
        facts_of: Callable[[PoolName], Facts],
        advice_of: Callable[[PoolName, Mapping[str, ClassWindow]], tuple[str, ...]],
        batches: BatchDecisions,
        degree_of: Callable[[PoolName, Mapping[str, ClassWindow]], DegreeChange | None] | None,
        hour: Clock,
        replanning: Replanning | None = None,
    ) -> None:
        """``scaler_at`` is where the scaler is, for the log. ``drain`` lets a member drain, for a reason. ``switch`` lets one
        switch to a role, for a reason, as ``switching`` decides (None: never). ``facts_of`` gives what profiles say of a pool,
        ``advice_of`` what people can improve; ``batches`` decides on the limits of batches. ``degree_of``
        gives a better tensor-parallel degree, to which pools are rolled; None: only by hand. ``hour`` is the time in hours since the
        beginning of 1970, UTC. ``replanning`` follows a plan, if there is one.
        """
        self._limits = limits
        self._scaling = scaling
        self._pool_limits = pool_limits
        self._scaler = scaler
        self.acting = acting
        self._drain = drain
        self._switching = switching
        self._switch = switch
        self._clock = clock
        self._scope = scope
        self._facts_of = facts_of
        self._advice_of = advice_of
        self._batches = batches
        self.leading = Leading(store, self, lease=lease, owner=owner, clock=clock, hour=hour)
        self.scaled = ScalerView(
            scaler,
            at=scaler_at,
            timeout_s=limits.scaler_timeout_s,
            leads=lambda: self.leading.leads,
            clock=clock,
        )
        self.pools: dict[PoolName, ControlledPool] = {}
        self.reports: dict[str, RouterReports] = {}
        """Reports of the routers, by each model that has pools."""
        self._switches: dict[str, SwitchMachine] = {}
        """Machines that decide on switches, by each model that has pools."""
        self._full = False
        self._rolls = Rolls(
            scaler,
            fence=lambda: self.leading.fence,
            feed=self._feed,
            drain=drain,
            patience=pool_limits.order_starts,
            timeout_s=limits.scaler_timeout_s,
            scope=scope,
        )
        self._degree_of = degree_of
        self._degrees_asked_s: dict[PoolName, float] = {}
        self.replanning = replanning

    def start(self) -> None:
        self.leading.start(self._scope)
        self._scope.spawn(self.scaled.run(), name="scaler", vital=True)

    # --- what it is told ---------------------------------------------------------------------------------------------

    def report(self, router: Registration, report: WindowReport) -> None:
        if (reports := self.reports.get(router.model)) is not None:
            reports.accept(router.instance_id, report, self._clock())

    async def set_size(self, order: ManualSize) -> None:
        """Set a size by hand, like ``ports.PoolManager.set_size``. It takes effect once the store has it, so that no
        change of leader undoes it.
        """
        async with self.leading.writing() as keep:
            pool, event = self._manual(order)
            override = Override(event.size, event.for_s) if isinstance(event, OverrideSet) else None
            await keep(str(order.pool), replace(pool.machine.kept(self._clock()), override=override))
            self._feed(pool, event)

    async def roll(self, name: PoolName, degree: int) -> None:
        """Replace the instances of a pool by such with another tensor-parallel degree, like ``ports.PoolManager.roll``."""
        if (pool := self.pools.get(name)) is None:
            raise NotFound("no pool has this model, role and tier", param="role")
        if self.leading.fence is None:
            raise Unavailable(f"no pool is rolled here now: {self.leading.why_not()}")
        await self._rolls.begin(pool, degree, self._bounds(name), "an operator asked for it", self._clock())

    def _manual(self, order: ManualSize) -> tuple[ControlledPool, OverrideSet | OverrideEnded]:
        name = order.pool
        if name in self.scaled:
            self._find(name, ())
        if (pool := self.pools.get(name)) is None:
            raise NotFound("no pool has this model and role", param="role")
        if order.size is None:
            return pool, OverrideEnded()
        bounds = self._bounds(name)
        if not bounds.least <= order.size <= bounds.most:
            text = f"size is {order.size}, must be from {bounds.least} to {bounds.most}"
            raise InvalidRequest(text, param="size")
        if not order.for_s > 0:
            raise InvalidRequest("a size by hand needs a time after which it ends", param="for_s")
        return pool, OverrideSet(order.size, order.for_s)

    def tick(self, pools: Sequence[PoolStatus]) -> None:
        """Decide, given the members now."""
        now_s = self._clock()
        members_of = {pool.name: pool.members for pool in pools if pool.name is not None}
        self._find_and_forget(members_of, now_s)
        for model, reports in self.reports.items():
            routers = (pool.members for pool in pools if pool.role is None and pool.model == model)
            reports.retain({member.registration.instance_id for members in routers for member in members})
        instances_of = {name: self._look(pool, members_of.get(name, ()), now_s) for name, pool in self.pools.items()}
        tiers = self._compare_tiers(members_of)
        if self.replanning is not None:
            self._follow_plan(self.replanning, members_of)
        for model in self.reports:
            self._switch_roles(model, members_of, tiers, now_s)
        heard = sum(len(pool.members) for pool in pools)
        lost = sum(
            instance.phase is InstancePhase.LOST for instances in instances_of.values() for instance in instances
        )
        for name, instances in instances_of.items():
            pool = self.pools[name]
            self._feed(pool, Frozen(self.leading.why_not() or self._why_not(pool)))
            self._feed(pool, InstancesSeen(instances, cut_off=lost >= heard))
            if self.replanning is not None:
                self._feed(pool, SizePlanned(self.replanning.size(name)))
            self._feed(pool, PoolTick())
            self._decide_batches(pool, members_of.get(name, ()), now_s)
            self._decide_degree(pool, now_s)
            self._rolls.tick(pool, instances, members_of.get(name, ()), now_s)
            if (view := pool.machine.view) is not None:
                self.leading.observe(view)

    def _compare_tiers(self, members_of: Mapping[PoolName, Sequence[MemberStatus]]) -> Mapping[PoolName, TierShare]:
        """What the pools of one role on several kinds of devices leave to each other."""
        tiers: dict[tuple[str, Role], list[ControlledPool]] = {}
        for name, pool in self.pools.items():
            pool.tier = next((member.registration.tier for member in members_of.get(name, ())), pool.tier)
            tiers.setdefault((name.model, name.role), []).append(pool)
        shared: dict[PoolName, TierShare] = {}
        for pools in tiers.values():
            found = shares([self._tier_view(pool) for pool in pools])
            shared |= {pool.name: found[str(pool.name)] for pool in pools}
        return shared

    def _tier_view(self, pool: ControlledPool) -> TierView:
        view = pool.machine.view
        return TierView(
            str(pool.name),
            pool.machine.wanted,
            0 if view is None else view.serving,
            self._bounds(pool.name),
            None if view is None else view.facts.capacity_per_s,
            None if pool.tier is None else pool.tier.usd_per_hour,
            given_up=pool.machine.is_given_up,
        )

    def _decide_batches(self, pool: ControlledPool, members: Sequence[MemberStatus], now_s: float) -> None:
        reports, may_order = self.reports[pool.name.model], self.leading.fence is not None
        found = self._batches.decide(pool.name, members, lambda: reports.classes(SHORT_S, now_s), may_order=may_order)
        if found is not None:
            self._feed(pool, Noted(Why.LIMITS, found.reason, found.advised))

    def _decide_degree(self, pool: ControlledPool, now_s: float) -> None:
        if self._degree_of is None or self.leading.fence is None or pool.roll is not None or self.acting.advisory:
            return
        if now_s - self._degrees_asked_s.get(pool.name, -_DEGREES_S) < _DEGREES_S:
            return
        self._degrees_asked_s[pool.name] = now_s
        change = self._degree_of(pool.name, self.reports[pool.name.model].classes(LONG_S, now_s))
        if change is not None:
            bounds = self._bounds(pool.name)
            begin = self._rolls.begin_by_itself(pool, change.best, bounds, str(change), now_s)
            self._scope.spawn(begin, name=f"roll {pool.name}")

    def _follow_plan(self, replanning: Replanning, members_of: Mapping[PoolName, Sequence[MemberStatus]]) -> None:
        """Before roles and sizes are decided on, which follow it."""
        if self.leading.fence is None:
            replanning.pause(self.leading.why_not())
            return
        model = replanning.plan.model
        members = [member for name, pool in members_of.items() if name.model == model for member in pool]
        pools: dict[PoolName, PoolSize] = {}
        if self.acting is Acting.ALL:
            for name, pool in self.pools.items():
                if name.model == model:
                    bounds = self._bounds(name)
                    pools[name] = PoolSize(pool.machine.wanted, bounds.least, bounds.most)
        replanning.tick(members, pools, self.reports.get(model))

    def _bounds(self, name: PoolName) -> Bounds:
        """Sizes that a pool may have: its own bounds, else those of the plan, else those of all pools."""
        if (own := self._limits.own_bounds(name)) is not None:
            return own
        planned = None if self.replanning is None else self.replanning.bounds_of(name)
        return planned or self._limits.bounds(name)

    # --- roles -------------------------------------------------------------------------------------------------------

    def _switch_roles(
        self,
        model: str,
        members_of: Mapping[PoolName, Sequence[MemberStatus]],
        tiers: Mapping[PoolName, TierShare],
        now_s: float,
    ) -> None:
        """Switch roles before sizes are decided on. A switch shows within seconds, an instance that is started within
        minutes.
        """
        of_model = [(name.role, pool) for name, pool in self.pools.items() if name.model == model]
        pools = dict(of_model)
        members = [
            member for name, pool_members in members_of.items() if name.model == model for member in pool_members
        ]
        machine = None
        if self._switching is not None:
            machine = self._switches.setdefault(model, SwitchMachine(self._switching))
            moving = self.replanning is not None and self.replanning.is_moving and self.replanning.plan.model == model
            if self.leading.fence is None or moving:
                machine.forget()
            else:
                views = {role: pool.machine.view for role, pool in pools.items() if pool.machine.view is not None}
                for switch in machine.handle(stage_views(members, views), now_s):
                    for name in switch.instances:
                        self._switch(name, Role.of({switch.target}), switch.reason)
        since_s = None if machine is None else machine.since_s(now_s)
        alone = Counter(role for role, _ in of_model)
        for role, pool in of_model:  # of tiers nobody can say whom one that switched helps
            helped = switched(role, members) if alone[role] == 1 else 0
            self._feed(pool, RolesSeen(helped, since_s, tiers[pool.name]))

    # --- pools -------------------------------------------------------------------------------------------------------

    def _find_and_forget(self, members_of: Mapping[PoolName, Sequence[MemberStatus]], now_s: float) -> None:
        for name in {*members_of, *self.scaled.existing()}:
            self._find(name, members_of.get(name, ()))
            if name in self.pools:
                self.pools[name].seen_s = now_s
        for name, pool in list(self.pools.items()):
            if now_s - pool.seen_s >= (0.0 if self.acting is Acting.NONE else _GONE_S) and name not in members_of:
                pool.orders.close()
                self._batches.forget(name)
                self._degrees_asked_s.pop(name, None)
                self._rolls.forget(name)
                del self.pools[name]
        for model in self.reports.keys() - {name.model for name in self.pools}:
            del self.reports[model]
            self._switches.pop(model, None)

    def _find(self, name: PoolName, members: Sequence[MemberStatus]) -> None:
        if name in self.pools:
            return
        if len(self.pools) >= _MAX_POOLS:
            if not self._full:
                logger.warning("pool %s and further ones are not looked after: %d are the limit", name, _MAX_POOLS)
            self._full = True
            return
        now_s = self._clock()
        bounds = self._bounds(name)
        wanted = self.scaled.wanted(name)
        size = len(members) if wanted is None else wanted
        settings = PoolSettings(
            str(name),
            name.role,
            bounds,
            initial=size if self.acting.advisory else max(bounds.least, size),
            start_s=self._limits.start_s,
            facts=self._facts_of(name),
        )
        machine = PoolMachine(
            settings,
            self._reports_of(name.model),
            scaling=self._scaling,
            limits=self._pool_limits,
            now_s=now_s,
            acting=self.acting,
        )
        orders = Orders(
            name,
            self._scaler,
            fence=lambda: self.leading.fence,
            answer=lambda answer: self._feed(pool, answer),
            works=machine.works,
            timeout_s=self._limits.scaler_timeout_s,
            clock=self._clock,
        )
        pool = self.pools[name] = ControlledPool(name, machine, orders, now_s, now_s)
        self.leading.pool_found(name)
        self._scope.spawn(orders.run(), name=f"orders {name}", vital=True, may_end=True)

    def _reports_of(self, model: str) -> RouterReports:
        return self.reports.setdefault(model, RouterReports(attainment_s=self._scaling.attainment_window_s))

    def _look(self, pool: ControlledPool, members: Sequence[MemberStatus], now_s: float) -> tuple[PoolInstance, ...]:
        """The instances of a pool, those included that are no members."""
        scaled = self.scaled.instances(pool.name)
        seen = pool.starting.observe(tuple(map(_instance, members)), scaled, now_s)
        for reason in seen.failures:
            pool.start_failures += 1
            if pool.roll is not None:
                pool.roll.failed(reason)
            logger.warning("pool %s: an instance did not start: %s", pool.name, reason)
            self._feed(pool, StartFailed(reason))
        return seen.instances

    def _why_not(self, pool: ControlledPool) -> str:
        """Why nothing may be ordered of this pool now, although this manager leads; empty if it may."""
        if self.acting is Acting.NONE:
            return ""
        if not self.scaled.answered:
            return f"waiting for the first answer of the scaler{f' ({self.scaled.fault})' if self.scaled.fault else ''}"
        is_new = self._clock() - pool.found_s < self._limits.adopt_s
        return "the pool was just found: its members may still register" if is_new and not self.acting.advisory else ""

    def _feed(self, pool: ControlledPool, event: PoolEvent) -> None:
        for effect in pool.machine.handle(event, self._clock()):
            match effect:
                case ScaleTo():
                    pool.orders.scale(effect)
                case RemoveInstance():
                    pool.orders.remove(effect)
                case DrainInstance(instance_id, _, reason):
                    if self.leading.fence is not None:
                        self._drain(instance_id, reason)
                case RecordDecision(record):
                    _log(record)
                    self.leading.note(record)

    # --- for the next leader (``leading.Pools``) ---------------------------------------------------------------------

    def kept(self) -> Mapping[PoolName, SavedPool]:
        now_s = self._clock()
        return {name: pool.machine.kept(now_s) for name, pool in self.pools.items()}

    def resume(self, name: PoolName, kept: SavedPool | None, records: tuple[DecisionRecord, ...] = ()) -> None:
        self._feed(self.pools[name], PoolResumed(kept, records))

    async def look(self) -> None:
        await self.scaled.ask()

    def first(self, name: PoolName) -> SavedPool | None:
        if self.acting.advisory or not self._limits.initial_from_history:
            return None
        return SavedPool(self.leading.initial_size(name, self._bounds(name)))

    # --- readers -----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        for pool in self.pools.values():
            pool.machine.validate()
        for reports in self.reports.values():
            reports.validate()
        if self.replanning is not None:
            self.replanning.validate()

    def records(self, model: str, role: Role) -> tuple[DecisionRecord, ...]:
        """The last decisions on a pool, oldest first; empty for an unknown one."""
        pool = self.pools.get(PoolName(model, role))
        return () if pool is None else pool.machine.records(self._clock())

    def pressures(self) -> dict[tuple[str, ...], float]:
        """Pressures by model and stage, as in ``SwitchMachine.pressures``; empty where this manager decides on no
        switches.
        """
        return {
            (model, stage.value): pressure
            for model, machine in self._switches.items()
            for stage, pressure in machine.pressures.items()
        }

    def sizes(self) -> dict[PoolName, ScalingStatus]:
        """The size of each pool, without advice."""
        return {
            name: replace(pool.machine.status(self._clock()), rolling="" if pool.roll is None else str(pool.roll))
            for name, pool in self.pools.items()
        }

    def status(self) -> dict[PoolName, ScalingStatus]:
        """The size of each pool."""
        mixes = {model: reports.classes(LONG_S, self._clock()) for model, reports in self.reports.items()}
        return {
            name: replace(size, advice=self._advice_of(name, mixes[name.model])) for name, size in self.sizes().items()
        }


def _instance(member: MemberStatus) -> PoolInstance:
    loads = member.load.stages.values()
    return PoolInstance(
        member.registration.instance_id,
        _PHASES[member.condition],
        age_s=member.since_s,
        running=sum(load.pending for load in loads),
        leased_bytes=sum(load.leased_bytes for load in loads),
    )


def _log(record: DecisionRecord) -> None:
    view, decision = record.view, record.decision
    reasons = "; ".join(f"{reason.why}: {reason.text}" for reason in decision.reasons)
    missing = f"; missing: {', '.join(decision.missing)}" if decision.missing else ""
    detail = f" ({record.detail})" if record.detail else ""
    logger.info(
        "pool %s: %d instances, %d wanted: %s%s; %s%s",
        view.pool,
        view.wanted,
        decision.target,
        reasons,
        missing,
        record.outcome,
        detail,
    )
