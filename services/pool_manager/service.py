"""The pool manager service: feeds members' reports to the machine, and tells watchers (``ports.PoolManager``)."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any

from triptych.domain.decision import Acting
from triptych.domain.instance import InstanceLimits
from triptych.domain.pool import (
    Farewell,
    Heartbeat,
    ManagerStatus,
    ManualSize,
    MemberCondition,
    MemberReport,
    MembershipDelta,
    MemberStatus,
    Order,
    OrderKind,
    PoolStatus,
    Registration,
    Watch,
)
from triptych.domain.pool_sizes import MAX_POOL_SIZE
from triptych.domain.scaling import PoolName
from triptych.domain.slo import Slo
from triptych.domain.stage import Role, Stage
from triptych.domain.windows import WindowReport
from triptych.errors import FailedPrecondition, InvalidRequest, NotFound, Overloaded, TriptychError, Unavailable
from triptych.machine.pool_manager.member_events import (
    DrainWanted,
    EndSession,
    FarewellReceived,
    HeartbeatReceived,
    MemberEvent,
    MemberLimitsWanted,
    MemberLogged,
    MembersChanged,
    MembersTick,
    MemberSwitchWanted,
    Registered,
    SendOrder,
    SessionEnded,
    SwitchEnded,
    SwitchServed,
)
from triptych.machine.pool_manager.members import MembersMachine
from triptych.policy.addresses import seen_from, why_not_called
from triptych.policy.consequences import loss
from triptych.ports import Clock, Replanner, Scaler, Store
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.watched_value import ReportIntervals, WatchedValue
from triptych.runtime.world import World
from triptych.scaling.none import NoScaler
from triptych.wire.documents import discovery_document

from .batch_limits import BatchDecisions
from .capacity import Capacities
from .control import Control
from .plan import FollowedPlan
from .record import Record
from .replanning import Replanning
from .settings import PoolManagerSettings
from .sharing import SharedProfiles

logger = logging.getLogger(__name__)

_MAX_NAME_LENGTH = 220
"""Most characters in the name of an instance or a model. With a role and a tier it must be a key of the store, and a line of the
log.
"""
_DECIDE_S = 1.0
"""Between two decisions on the size of pools."""
_INTERVALS = ReportIntervals(load_min_interval_s=0.05, load_max_interval_s=1.0)
"""Between two deltas to one watcher."""
_MOST_DELTAS_PER_S = 2000.0
"""Most deltas to all watchers together, per second. While the list changes all the time, many watchers must not keep
members from registering.
"""


class _Session:
    """Stream of a member. Orders of one kind are coalesced, so that a slow member does not grow it."""

    def __init__(self) -> None:
        self.reader: asyncio.Task[object] | None = None
        self._orders: dict[OrderKind, Order] = {}
        self._error: TriptychError | None = None
        self._over = False
        self._event = asyncio.Event()

    def put(self, order: Order) -> None:
        self._orders[order.kind] = order
        self._event.set()

    def end(self, error: TriptychError | None = None) -> None:
        self._over, self._error = True, self._error or error
        self._event.set()

    async def next(self) -> Order | None:
        """The next order; None at the end. Raises what ended the stream, if that was an error."""
        while True:
            if self._orders:
                return self._orders.pop(next(iter(self._orders)))
            if self._error is not None:
                raise self._error
            if self._over:
                return None
            self._event.clear()
            await self._event.wait()


class PoolManagerService:
    """``ports.PoolManager``. Its incarnation is the world's epoch, its name among those that share the store the world's."""

    def __init__(
        self,
        settings: PoolManagerSettings,
        world: World,
        *,
        store: Store,
        scaler: Scaler | None,
        profiles: KnownProfiles,
        hour: Clock,
        record: Record,
        plan: FollowedPlan | None = None,
        replanner: Replanner | None = None,
    ) -> None:
        """Without a scaler it only advises. ``profiles``: of the models' parts. ``hour``: the time in hours since the beginning of 1970.
        ``plan`` is followed, with searches by ``replanner``.
        """
        self._settings = settings
        self._record = record
        self._clock = clock = world.clock
        self._scope = scope = world.scope
        self._began_s = clock()
        self._machine = MembersMachine(settings.members, incarnation=world.epoch, now_s=self._began_s)
        self._changes = WatchedValue(lambda: self._machine.version, _INTERVALS, most_per_s=_MOST_DELTAS_PER_S)
        self._shared_profiles = SharedProfiles(profiles, store)
        self._capacities = Capacities(profiles, host_devices=settings.host_devices)
        replanning = None
        if plan is not None and replanner is not None:
            replanning = Replanning(
                plan,
                settings.replanning,
                replans=settings.replan,
                replanner=replanner,
                switch=self._switch,
                clock=clock,
                scope=scope,
            )
        self.control = Control(
            settings.control,
            scaling=settings.scaling,
            pool_limits=settings.pools,
            lease=settings.lease,
            owner=world.name,
            store=store,
            scaler=NoScaler(max_size=MAX_POOL_SIZE) if scaler is None else scaler,
            scaler_at=settings.scaler,
            acting=Acting.NONE if scaler is None else Acting.ALL if settings.autoscale else Acting.MANUAL,
            drain=lambda name, reason: self._feed(DrainWanted(name, reason)),
            switching=settings.switching if settings.switch_roles else None,
            switch=self._switch,
            clock=clock,
            scope=scope,
            facts_of=self._capacities.facts,
            advice_of=self._capacities.advice,
            batches=BatchDecisions(
                self._capacities.better_batch,
                lambda name, limits, reason: self._feed(MemberLimitsWanted(name, limits, by_hand=False, reason=reason)),
                advises=settings.batch_limits == "advise" or not settings.autoscale,
                clock=clock,
            ),
            degree_of=self._capacities.better_degree if settings.roll_degrees else None,
            hour=hour,
            replanning=replanning,
        )
        """Control of the pools' sizes."""
        self._sessions: dict[int, _Session] = {}
        self._numbers = count(1)
        self._watchers = 0
        self._gateways = Counter[str]()
        """Watchers by the address of their metrics, which those that are members do not tell."""
        self._draining = False

    def start(self) -> None:
        """Start checking for silence, and keeping the size of pools."""
        self.control.start()
        self._scope.spawn(self._shared_profiles.run(), name="profiles", vital=True)
        self._scope.spawn(self._tick(), name="tick", vital=True)

    async def missing(self) -> tuple[str, ...]:
        """Why it is not ready; empty if it is."""
        return ("it is draining",) if self._draining else ()

    async def drain(self) -> None:
        """Refuse new streams and end those of the members, which look for another manager."""
        self._draining = True
        for session in list(self._sessions.values()):
            session.end(Unavailable("the pool manager is shutting down"))

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        self._machine.validate()
        self.control.validate()

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the list of members."""
        return self._machine.version

    @property
    def watchers(self) -> int:
        return self._watchers

    def metrics_targets(self) -> list[dict[str, Any]]:
        """Where metrics can be scraped that this manager knows of, in Prometheus' format of HTTP service discovery."""
        members = [member.registration for pool in self._machine.pools(self._clock()) for member in pool.members]
        return discovery_document(members, sorted(self._gateways), seen_from(self._settings.metrics_address, ""))

    def members_by_state(self) -> dict[tuple[str, ...], int]:
        """Number of members by role (empty for routers) and condition, or ``suspected``."""
        counts: dict[tuple[str, ...], int] = {}
        for pool in self._machine.pools(self._clock()):
            for member in pool.members:
                state = "suspected" if member.suspected else member.condition.value
                key = ("" if pool.role is None else pool.role.value, state)
                counts[key] = counts.get(key, 0) + 1
        return counts

    def instances_by_stage(self) -> dict[tuple[str, ...], int]:
        """Number of active instances that serve a stage, by model and stage, those that are suspected left out."""
        counts: dict[tuple[str, ...], int] = {}
        for pool in self._machine.pools(self._clock()):
            if pool.role is None:
                continue
            for stage in Stage:
                key = (pool.model, stage.value)
                usable = (
                    member
                    for member in pool.members
                    if member.condition is MemberCondition.ACTIVE and not member.suspected
                )
                counts[key] = counts.get(key, 0) + sum(stage in member.open for member in usable)
        return counts

    def switches_pending_s(self) -> dict[tuple[str, ...], float]:
        """Age of the oldest order to switch that is not obeyed, by model, seconds; 0 without one."""
        return {(model,): age_s for model, age_s in self._machine.switches_pending_s(self._clock()).items()}

    def switches_unserved_s(self) -> dict[tuple[str, ...], float]:
        """Longest time, by model, that a stage which an order has opened has had work and served nothing, seconds."""
        return {(model,): age_s for model, age_s in self._machine.switches_unserved_s(self._clock()).items()}

    @property
    def silences(self) -> Mapping[tuple[str, ...], int]:
        """Members that were silent since the start, by role (empty for routers) and what came of it."""
        return self._machine.silences

    # --- ports.PoolManager -------------------------------------------------------------------------------------------

    async def attend(self, reports: AsyncGenerator[MemberReport]) -> AsyncGenerator[Order]:
        self._refuse_while_draining()
        self._make_room()
        number = next(self._numbers)
        session = self._sessions[number] = _Session()
        try:
            try:
                self._scope.spawn(self._read(number, session, reports), name=f"member stream {number}")
            except RuntimeError:
                raise Unavailable("the pool manager is shutting down") from None
            while (order := await session.next()) is not None:
                yield order
        finally:
            if session.reader is not None:
                session.reader.cancel()
            self._sessions.pop(number, None)
            self._feed(SessionEnded(number))

    async def watch(self, watch: Watch) -> AsyncGenerator[MembershipDelta]:
        """A slow watcher skips versions: each delta is computed when it can be sent."""
        self._refuse_while_draining()
        if self._watchers >= self._settings.max_watchers:
            raise Overloaded(f"{self._watchers} watchers are connected, which is the limit")
        self._watchers += 1
        self._gateways[watch.metrics] += 1
        try:
            async with aclosing(self._changes.watch()) as versions:
                async for _ in versions:
                    delta = self._machine.since(watch)
                    watch = replace(watch, incarnation=delta.incarnation, version=delta.version)
                    yield delta
        finally:
            self._watchers -= 1
            self._gateways -= Counter((watch.metrics,))

    async def status(self) -> ManagerStatus:
        now_s = self._clock()
        scaling = self.control.status()
        pools = [
            pool if pool.name is None else replace(pool, scaling=scaling.pop(pool.name, None))
            for pool in self._machine.pools(now_s)
        ]
        pools += [PoolStatus(name.model, name.role, (), scaling_, name.tier) for name, scaling_ in scaling.items()]
        up_s = now_s - self._began_s
        return ManagerStatus(
            self._machine.incarnation,
            self._machine.version,
            up_s,
            self._watchers,
            tuple(pools),
            leads=self.control.leading.leads,
            leader=self.control.leading.leader,
            store_fault=self.control.leading.store_fault,
            plan=None if self.control.replanning is None else self.control.replanning.status(),
        )

    async def drain_instance(self, instance_id: str, *, force: bool) -> None:
        if instance_id not in self._machine:
            raise NotFound("no member has this instance id", param="instance_id")
        if not force and (lost := loss(instance_id, self._machine.pools(self._clock()))):
            raise FailedPrecondition(lost, param="instance_id")
        self._feed(DrainWanted(instance_id, "an operator asked for it"))

    async def switch_instance(self, instance_id: str, role: Role, *, force: bool) -> None:
        pools = self._machine.pools(self._clock())
        member = self._member(instance_id)
        widest = member.registration.switchable
        if widest is None:
            raise InvalidRequest(f"{instance_id} cannot switch: it runs without --switchable", param="instance_id")
        if not widest.serves(*role.stages):
            raise InvalidRequest(f"role is {role.value}, {instance_id} can switch within {widest.value}", param="role")
        if member.condition is not MemberCondition.ACTIVE:
            raise FailedPrecondition(f"{instance_id} is {member.condition}: it switches no more", param="instance_id")
        if not force and (lost := loss(instance_id, pools, keeps=role.stages)):
            raise FailedPrecondition(lost, param="instance_id")
        if self.control.leading.fence is None:
            raise Unavailable(f"roles cannot be ordered here now: {self.control.leading.why_not()}")
        self._feed(MemberSwitchWanted(instance_id, role, "an operator asked for it"))

    async def set_limits(self, instance_id: str, wanted: InstanceLimits) -> None:
        member = self._member(instance_id)
        if (report := member.load.limits) is None:
            raise InvalidRequest(f"{instance_id} reports no limits that can change while it runs", param="instance_id")
        if lacking := wanted.beyond(report.limits):
            has = ", ".join(report.limits.given)
            raise InvalidRequest(f"{instance_id} has no {', '.join(lacking)}; it has {has}", param=lacking[0])
        if self.control.leading.fence is None:
            raise Unavailable(f"limits cannot be ordered here now: {self.control.leading.why_not()}")
        self._feed(
            MemberLimitsWanted(instance_id, wanted, by_hand=bool(wanted.given), reason="an operator asked for it")
        )

    async def set_size(self, order: ManualSize) -> None:
        self._refuse_while_draining()
        await self.control.set_size(order)

    async def roll(self, pool: PoolName, degree: int) -> None:
        self._refuse_while_draining()
        await self.control.roll(pool, degree)

    def _member(self, instance_id: str) -> MemberStatus:
        """Raises NotFound."""
        members = (member for pool in self._machine.pools(self._clock()) for member in pool.members)
        for member in members:
            if member.registration.instance_id == instance_id:
                return member
        raise NotFound("no member has this instance id", param="instance_id")

    # --- private -----------------------------------------------------------------------------------------------------

    def _refuse_while_draining(self) -> None:
        if self._draining:
            raise Unavailable("the pool manager is shutting down")

    def _make_room(self) -> None:
        """Make room for one more stream. Those of members are as many as members may be; of the others, the oldest one
        ends.
        """
        most = self._settings.max_unregistered
        if len(self._sessions) - self._machine.sessions < most:
            return
        oldest = next(number for number in self._sessions if not self._machine.has_session(number))
        self._sessions.pop(oldest).end(Overloaded(f"{most} newer streams are open and have not registered either"))

    async def _read(self, number: int, session: _Session, reports: AsyncGenerator[MemberReport]) -> None:
        """Read one member's reports until its farewell, its end, or an error."""
        session.reader = asyncio.current_task()
        try:
            due_s = self._clock()
            async with aclosing(reports), asyncio.timeout(self._settings.register_timeout_s) as deadline:
                while number in self._sessions:
                    report = await anext(reports)
                    if (early_s := due_s - self._clock()) > 0:
                        await asyncio.sleep(early_s)
                    due_s = self._clock() + self._settings.min_report_interval_s
                    self._report(number, report)
                    if isinstance(report, Farewell):
                        return
                    if self._machine.has_session(number):
                        deadline.reschedule(None)
        except StopAsyncIteration:
            pass
        except TimeoutError:
            session.end(InvalidRequest("the stream has not registered a member in time"))
        except TriptychError as error:
            session.end(error)
        finally:
            session.end()

    def _report(self, number: int, report: MemberReport) -> None:
        match report:
            case Registration():
                for name, value in (("instance_id", report.instance_id), ("model", report.model)):
                    if len(value) > _MAX_NAME_LENGTH or not value.isprintable():
                        text = (
                            f"the member's {name} is refused: it must be up to {_MAX_NAME_LENGTH} printable characters"
                        )
                        raise InvalidRequest(text, param=name)
                if report.tier is not None and (fault := report.tier.fault):
                    raise InvalidRequest(fault, param="tier")
                reason = why_not_called(report.address, beyond_loopback=self._settings.reaches_network)
                if reason is not None:
                    raise InvalidRequest(f"the member's address is refused: {reason}", param="address")
                try:
                    Slo.parse(report.slo)
                except ValueError as error:
                    raise InvalidRequest(str(error), param="slo") from None
                self._feed(Registered(number, report))
            case Heartbeat():
                self._feed(HeartbeatReceived(number, report))
            case Farewell(reason):
                self._feed(FarewellReceived(number, reason))
            case WindowReport():
                if (router := self._machine.router_of(number)) is not None:
                    self.control.report(router, report)

    async def _tick(self) -> None:
        decided_s = self._clock()
        while True:
            await asyncio.sleep(self._settings.members.tick_s)
            self._feed(MembersTick())
            if self._clock() - decided_s >= _DECIDE_S:
                decided_s = self._clock()
                pools = self._machine.pools(decided_s)
                self._capacities.observe(pools)
                self.control.tick(pools)

    def _switch(self, instance_id: str, role: Role, reason: str) -> None:
        self._feed(MemberSwitchWanted(instance_id, role, reason))

    def _feed(self, event: MemberEvent) -> None:
        for effect in self._machine.handle(event, self._clock()):
            match effect:
                case SendOrder(session, order) if session in self._sessions:
                    self._sessions[session].put(order)
                case EndSession(session, reason) if session in self._sessions:
                    logger.info("ended a member's stream: %s", reason)
                    self._sessions[session].end(Unavailable(reason))
                case MembersChanged():
                    self._changes.notify()
                case MemberLogged(instance_id, change):
                    logger.info("%s %s", instance_id, change)
                case SwitchEnded():
                    self._record.switch_ended(effect)
                case SwitchServed():
                    self._record.switch_served(effect)
                case _:
                    """The stream is gone."""
