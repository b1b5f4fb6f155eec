"""Keeps pools at the size that is decided: feeds the machines of pools, and carries out what they order."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client.core import Metric

from triptych.domain.decision import (
    Bounds,
    DecisionRecord,
    InstancePhase,
    KeptPool,
    Override,
    PoolInstance,
    PoolState,
    ScalingStatus,
)
from triptych.domain.limits import Positive, PositiveSeconds, Seconds, check_limits
from triptych.domain.pool import Condition, ManualSize, MemberStatus, PoolStatus, Registration
from triptych.domain.pool_sizes import MAX_POOL_SIZE, bounds_of, parse_bounds
from triptych.domain.scaling import PoolName, ScaledPool
from triptych.domain.stage import Role
from triptych.domain.store import Fence
from triptych.domain.windows import ClassWindow, WindowReport
from triptych.errors import (
    Deposed,
    InvalidRequest,
    NotFound,
    StoreCorrupt,
    StoreUnavailable,
    TriptychError,
    Unavailable,
)
from triptych.machine.pool_manager.pool_events import (
    DrainInstance,
    Frozen,
    InstancesSeen,
    OverrideEnded,
    OverrideSet,
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
from triptych.machine.pool_manager.pools import Facts, PoolLimits, PoolSettings, PoolsMachine
from triptych.machine.pool_manager.starting import StartingInstances
from triptych.policy.scaling import ScalingLimits
from triptych.ports import Clock, Scaler, Store
from triptych.runtime.metrics import gauge, total
from triptych.runtime.tasks import TaskScope
from triptych.store.leadership import Leadership, LeaseTimes

from .histories import Histories
from .keeper import Keeper, Left, later
from .orders import Orders

logger = logging.getLogger(__name__)

_LEASE = "pool-manager"
_MAX_POOLS = 256
_POLL_S = 1.0
_KEEP_S = 0.5
_FOLLOW_S = 5.0
"""How often a manager that does not lead looks at what the leader keeps."""
_GONE_S = 60.0
"""A pool without members, of which the scaler knows nothing either, is forgotten after this long."""
_PHASES = {
    Condition.ACTIVE: InstancePhase.READY,
    Condition.LEAVING: InstancePhase.DRAINING,
    Condition.DRAINED: InstancePhase.DRAINED,
}


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Sizes that pools may have, and patience with the scaler."""

    min_instances: Positive = 1
    """Smallest size of a pool."""
    max_instances: Positive = 64
    """Largest size of a pool."""
    pool_sizes: tuple[str, ...] = ()
    """Smallest and largest size of single pools, as [MODEL/]ROLE=LEAST-MOST (E=1-8, demo/PD=2-4), comma-separated."""
    start_s: PositiveSeconds = 60.0
    """Time from an order until an instance is ready, where no profile says it."""
    adopt_s: Seconds = 10.0
    """A pool that was just found is not changed for this long, so that its members can register."""
    initial_from_history: bool = False
    """A pool of which the store has no size starts with the size that the load of this hour needed in earlier weeks, or with
    its largest size if there is no history; otherwise with the instances that it has."""
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

    def bounds(self, pool: PoolName) -> Bounds:
        return bounds_of(pool, self.pool_sizes) or Bounds(self.min_instances, self.max_instances)


@dataclass(slots=True)
class _Pool:
    name: PoolName
    machine: PoolsMachine
    orders: Orders
    found_s: float
    seen_s: float
    starting: StartingInstances = field(default_factory=StartingInstances)
    start_failures: int = 0


class Control:
    """One ``PoolsMachine`` per pool. Only the manager that leads orders anything, under the fence of its lease.

    Pools are those that have members, and those of which the scaler knows instances. With ``autoscale`` decisions are
    carried out; without, sizes that were set by hand only. With ``acts`` false nothing is ordered: nobody would do it.
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
        autoscale: bool,
        acts: bool,
        drain: Callable[[str, str], None],
        clock: Clock,
        scope: TaskScope,
        facts_of: Callable[[PoolName], Facts],
        advice_of: Callable[[PoolName, Mapping[str, ClassWindow]], tuple[str, ...]],
        hour: Clock,
    ) -> None:
        """``scaler_at`` is where the scaler is, for the log. ``drain`` lets a member drain, for a reason. ``facts_of`` gives what profiles say of a pool,
        ``advice_of`` what people can improve. ``hour`` is the time in
        hours since the beginning of 1970, UTC.
        """
        self._limits = limits
        self._scaling = scaling
        self._pool_limits = pool_limits
        self._owner = owner
        self._store = store
        self._scaler = scaler
        self._scaler_at = scaler_at
        self._advisory = not autoscale
        self._acts = acts
        self._drain = drain
        self._clock = clock
        self._scope = scope
        self._facts_of = facts_of
        self._advice_of = advice_of
        self._leadership = Leadership(store, lease=_LEASE, owner=owner, times=lease, clock=clock)
        self._keeper = Keeper(store, clock, owner)
        self._histories = Histories(store, clock, hour)
        self._writing = asyncio.Lock()
        """Held from the reading of a pool until it is written: no older state is written over a newer one."""
        self._taken: Fence | None = None
        """The fence under which the state of the leader before was taken over."""
        self._leader = ""
        self._left: dict[str, Left] = {}
        """What the store had when it was last read, of pools that were not found since."""
        self._left_s = 0.0
        self._pools: dict[PoolName, _Pool] = {}
        self._routers: dict[str, str] = {}
        """The model of each router that has reported."""
        self._scaled: dict[PoolName, ScaledPool] | None = None
        """What the scaler said last; None before its first answer."""
        self._scaler_fault = ""
        self._full = False
        self._keep_fault = ""
        """Why the store was not read or written last; empty if it was."""

    def start(self) -> None:
        self._scope.spawn(self._leadership.run(), name="leadership", vital=True)
        self._scope.spawn(self._poll(), name="scaler", vital=True)
        self._scope.spawn(self._keep(), name="keeper", vital=True)

    # --- what it is told ---------------------------------------------------------------------------------------------

    def report(self, router: Registration, report: WindowReport) -> None:
        self._routers[router.instance_id] = router.model
        for name, pool in self._pools.items():
            if name.model == router.model:
                self._feed(pool, Reported(router.instance_id, report))

    async def set_size(self, order: ManualSize) -> None:
        """As ``ports.PoolManager.set_size``. It takes effect once the store has it, so that no change of leader undoes it."""
        async with self._writing:
            fence = self._fence()
            if fence is None:
                raise Unavailable(f"sizes cannot be set here now: {self._frozen()}")
            pool, event = self._manual(order)
            name, now_s = str(order.pool), self._clock()
            override = Override(event.size, event.for_s) if isinstance(event, OverrideSet) else None
            try:
                await self._keeper.keep(name, replace(pool.machine.kept(name, now_s), override=override), fence)
            except Deposed:
                raise Unavailable("another manager leads now: set the size there") from None
            self._feed(pool, event)

    def _manual(self, order: ManualSize) -> tuple[_Pool, OverrideSet | OverrideEnded]:
        name = order.pool
        if name not in self._pools and name in (self._scaled or {}):
            self._find(name, ())
        if (pool := self._pools.get(name)) is None:
            raise NotFound("no pool has this model and role", param="role")
        if order.size is None:
            return pool, OverrideEnded(str(name))
        bounds = self._limits.bounds(name)
        if not bounds.least <= order.size <= bounds.most:
            text = f"size is {order.size}, must be from {bounds.least} to {bounds.most}"
            raise InvalidRequest(text, param="size")
        if not order.for_s > 0:
            raise InvalidRequest("a size by hand needs a time after which it ends", param="for_s")
        return pool, OverrideSet(str(name), order.size, order.for_s)

    def tick(self, pools: Sequence[PoolStatus]) -> None:
        """Decide, given the members now."""
        now_s = self._clock()
        there = {PoolName(pool.model, pool.role): pool.members for pool in pools if pool.role is not None}
        self._forget_routers(
            {one.registration.instance_id for pool in pools if pool.role is None for one in pool.members}
        )
        for name in {**there, **{name: () for name, pool in (self._scaled or {}).items() if _exists(pool)}}:
            self._find(name, there.get(name, ()))
            if name in self._pools:
                self._pools[name].seen_s = now_s
        for name, pool in list(self._pools.items()):
            if now_s - pool.seen_s >= (_GONE_S if self._acts else 0.0) and name not in there:
                pool.orders.close()
                del self._pools[name]
        found = {name: self._look(pool, there.get(name, ()), now_s) for name, pool in self._pools.items()}
        heard = sum(len(pool.members) for pool in pools)
        lost = sum(one.phase is InstancePhase.LOST for instances in found.values() for one in instances)
        for name, instances in found.items():
            pool = self._pools[name]
            self._feed(pool, Frozen(self._frozen(pool)))
            self._feed(pool, InstancesSeen(str(name), instances, cut_off=lost >= heard))
            self._feed(pool, Tick())
            if (view := pool.machine.view(str(name))) is not None:
                self._histories.observe(view)

    # --- pools -------------------------------------------------------------------------------------------------------

    def _find(self, name: PoolName, members: Sequence[MemberStatus]) -> None:
        if name in self._pools:
            return
        if len(self._pools) >= _MAX_POOLS:
            if not self._full:
                logger.warning("pool %s and further ones are not looked after: %d are the limit", name, _MAX_POOLS)
            self._full = True
            return
        now_s = self._clock()
        scaled = (self._scaled or {}).get(name)
        bounds = self._limits.bounds(name)
        size = len(members) if scaled is None or scaled.wanted is None else scaled.wanted
        settings = PoolSettings(
            str(name),
            name.role,
            bounds,
            initial=size if self._advisory else max(bounds.least, size),
            start_s=self._limits.start_s,
            facts=self._facts_of(name),
        )
        machine = PoolsMachine(
            (settings,),
            scaling=self._scaling,
            limits=self._pool_limits,
            now_s=now_s,
            advisory=self._advisory,
            manual=self._acts,
        )
        orders = Orders(
            name,
            self._scaler,
            fence=self._fence,
            answer=lambda answer: self._feed(pool, answer),
            works=lambda instance: machine.works(str(name), instance),
            timeout_s=self._limits.scaler_timeout_s,
            clock=self._clock,
        )
        pool = self._pools[name] = _Pool(name, machine, orders, now_s, now_s)
        left = self._left.pop(str(name), None)
        found = None if self._taken is None else self._first_size(name)
        self._feed(pool, Resumed(str(name), found if left is None else later(left.pool, now_s - self._left_s)))
        self._scope.spawn(orders.run(), name=f"orders {name}", vital=True, may_end=True)

    def _first_size(self, name: PoolName) -> KeptPool | None:
        """Of a pool of which nothing is kept; None for the instances that it has."""
        if self._advisory or not self._limits.initial_from_history:
            return None
        return KeptPool(self._histories.initial_size(str(name), self._limits.bounds(name)))

    def _look(self, pool: _Pool, members: Sequence[MemberStatus], now_s: float) -> tuple[PoolInstance, ...]:
        """The instances of a pool, those included that are no members."""
        name = str(pool.name)
        scaled = (self._scaled or {}).get(pool.name)
        seen = pool.starting.seen(tuple(map(_instance, members)), () if scaled is None else scaled.instances, now_s)
        for reason in seen.failures:
            pool.start_failures += 1
            logger.warning("pool %s: an instance did not start: %s", name, reason)
            self._feed(pool, StartFailed(name, reason))
        return seen.instances

    def _forget_routers(self, there: set[str]) -> None:
        for gone in self._routers.keys() - there:
            del self._routers[gone]
            for pool in self._pools.values():
                self._feed(pool, RouterGone(gone))

    def _feed(self, pool: _Pool, event: PoolEvent) -> None:
        for effect in pool.machine.handle(event, self._clock()):
            match effect:
                case ScaleTo():
                    pool.orders.scale(effect)
                case RemoveInstance():
                    pool.orders.remove(effect)
                case DrainInstance(_, instance_id, _, reason):
                    if self._fence() is not None:
                        self._drain(instance_id, reason)
                case RecordDecision(record):
                    _log(record)
                    if self._fence() is not None:
                        self._keeper.note(record)

    # --- leading -----------------------------------------------------------------------------------------------------

    def _fence(self) -> Fence | None:
        """The proof to send with an order; None unless this manager leads now, and knows what was decided before."""
        fence = self._leadership.fence
        return fence if fence is not None and fence == self._taken else None

    def _frozen(self, pool: _Pool | None = None) -> str:
        """Why nothing may be ordered now; empty if it may."""
        fence = self._leadership.fence
        if fence is None and self._store.fault:
            return f"the store does not answer: {self._store.fault}"
        if fence is None:
            return "another manager leads" if self._leader not in ("", self._owner) else "no manager leads yet"
        if fence != self._taken:
            fault = f": {self._keep_fault}" if self._keep_fault else ""
            return f"this manager begins to lead, and reads what was decided before{fault}"
        if not self._acts or pool is None:
            return ""
        if self._scaled is None:
            return (
                f"waiting for the first answer of the scaler{f' ({self._scaler_fault})' if self._scaler_fault else ''}"
            )
        found = self._clock() - pool.found_s < self._limits.adopt_s
        return "the pool was just found: its members may still register" if found and not self._advisory else ""

    async def _keep(self) -> None:
        """Take over from the leader before, and write what the next one needs to know."""
        read_s = -_FOLLOW_S
        while True:
            fence = self._leadership.fence
            try:
                if fence is None and self._clock() - read_s >= _FOLLOW_S:
                    read_s = self._clock()
                    await self._follow()
                    self._keep_fault = ""
                elif fence is not None:
                    await (self._write(fence) if fence == self._taken else self._take_over(fence))
                    self._keep_fault = ""
            except Deposed:
                logger.info("another manager leads: nothing more is written")
            except (StoreUnavailable, StoreCorrupt) as error:
                self._keep_fault = str(error)  # the store has logged it
            await asyncio.sleep(_KEEP_S)

    async def _write(self, fence: Fence) -> None:
        async with self._writing:
            now_s = self._clock()
            kept = {str(name): pool.machine.kept(str(name), now_s) for name, pool in self._pools.items()}
            await self._keeper.write(kept, fence)
        await self._histories.write(fence)
        if self._left and now_s - self._left_s >= _GONE_S:
            await self._keeper.drop(self._left.keys() - kept.keys(), fence)
            self._left = {}

    async def _follow(self) -> None:
        """Show what the leader has decided."""
        self._leader = await self._store.holder(_LEASE) or ""
        self._left, self._left_s = await self._keeper.read(), self._clock()
        if self._leadership.fence is None:
            for name, pool in self._pools.items():
                left = self._left.pop(str(name), None)
                if left is not None and left.owner != self._owner:  # else what is known here is newer
                    self._feed(pool, Resumed(str(name), left.pool))

    async def _take_over(self, fence: Fence) -> None:
        left = await self._keeper.read()
        records = await self._keeper.read_decisions()
        await self._histories.read()
        if self._leadership.fence != fence:
            return
        for name, pool in self._pools.items():
            one = left.pop(str(name), None)
            ours = one is None or one.owner == self._owner  # what is known here is newer
            kept: KeptPool | None = None if one is None or ours else one.pool
            if one is None and self._taken is None:
                kept = self._first_size(name)
            self._feed(pool, Resumed(str(name), kept, () if ours else records.get(str(name), ())))
        self._left, self._left_s = left, self._clock()
        self._taken, self._leader = fence, self._owner

    # --- the scaler --------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._limits.scaler_timeout_s):
                    found = await self._scaler.pools()
            except TimeoutError:
                fault = f"it did not answer within {self._limits.scaler_timeout_s:g} s"
            except TriptychError as error:
                fault = str(error)
            except Exception:
                logger.exception("the scaler has a defect")
                fault = "it has a defect"
            else:
                fault, self._scaled = "", {pool.name: pool for pool in found}
            if fault != self._scaler_fault:
                if fault:
                    logger.warning("the scaler at %s fails: %s", self._scaler_at, fault)
                else:
                    logger.info("the scaler at %s answers again", self._scaler_at)
            self._scaler_fault = fault
            await asyncio.sleep(_POLL_S)

    # --- readers -----------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this manager decides on sizes."""
        return self._fence() is not None

    @property
    def leader(self) -> str:
        """The manager that leads, as far as this one knows."""
        return self._leader

    @property
    def store_fault(self) -> str:
        """Why the store does not answer; empty if it does."""
        return self._store.fault or self._keep_fault

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        for pool in self._pools.values():
            pool.machine.validate()

    def records(self, model: str, role: Role) -> tuple[DecisionRecord, ...]:
        """The last decisions on a pool, oldest first; empty for an unknown one."""
        pool = self._pools.get(PoolName(model, role))
        return () if pool is None else pool.machine.records(str(pool.name), self._clock())

    def status(self) -> dict[PoolName, ScalingStatus]:
        """The size of each pool."""
        now_s = self._clock()
        return {
            name: replace(one, advice=self._advice_of(name, self._pools[name].machine.mix(now_s)))
            for name, one in self._statuses(now_s).items()
        }

    def _statuses(self, now_s: float) -> dict[PoolName, ScalingStatus]:
        return {name: pool.machine.status(now_s)[0] for name, pool in self._pools.items()}

    def metrics(self) -> Iterable[Metric]:
        labels = ("model_name", "role")
        found = {(name.model, name.role.value): one for name, one in self._statuses(self._clock()).items()}
        wanted: dict[tuple[str, ...], float] = {
            name: one.decisions[-1].target if self._advisory and one.decisions else one.wanted
            for name, one in found.items()
        }
        yield gauge("triptych_pool_wanted_instances", "Size that the pool should have", wanted, labels)
        yield gauge(
            "triptych_pool_attainment",
            "Share of requests without a missed TTFT that the pool is charged with, over the attainment window",
            {name: share for name, one in found.items() if (share := one.attainment.attainment) is not None},
            labels,
        )
        yield gauge(
            "triptych_pool_state",
            "1 for the pool's state",
            {(*name, state.value): float(one.state is state) for name, one in found.items() for state in PoolState},
            (*labels, "state"),
        )
        yield gauge("triptych_pool_manager_leads", "1 if this manager decides on sizes", float(self.leads))
        yield gauge("triptych_pool_store_up", "0 while the store does not answer", float(not self.store_fault))
        yield gauge("triptych_pool_scaler_up", "0 while the scaler does not answer", float(not self._scaler_fault))
        pools = self._pools.items()
        yield total(
            "triptych_pool_orders",
            "Orders that were sent to the scaler",
            {
                (name.model, name.role.value, *what): float(number)
                for name, pool in pools
                for what, number in pool.orders.sent.items()
            },
            (*labels, "kind", "outcome"),
        )
        yield total(
            "triptych_pool_start_failures",
            "Instances that ended before they were ready",
            {(name.model, name.role.value): float(pool.start_failures) for name, pool in pools},
            labels,
        )
        yield total(
            "triptych_pool_reports_dropped",
            "Reports of routers that were not counted",
            {
                (name.model, name.role.value, cause.value): number
                for name, pool in pools
                for cause, number in pool.machine.dropped.items()
            },
            (*labels, "cause"),
        )


def _exists(pool: ScaledPool) -> bool:
    """Whether somebody wants it: a pool that could exist, and is empty, is none."""
    return bool(pool.instances) or bool(pool.wanted)


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
    reasons = "; ".join(f"{one.why}: {one.text}" for one in decision.reasons)
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
