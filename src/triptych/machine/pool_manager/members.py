"""The members that a pool manager knows: registration, heartbeats, suspicion, drain, removal, and the versions of the list.

A member is active until it drains. Silence makes it suspected, then removes it; suspected members stay listed, as
whoever uses them may still reach them. Ids and addresses belong to one process at a time: a newer process replaces the
older one at once, unless the older one is provably there.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from triptych.domain.instance import InstanceLoad, LimitsReport
from triptych.domain.limits import Positive, PositiveSeconds, check_limits
from triptych.domain.membership import MAX_MEMBERS, Member, MemberKind, MemberState
from triptych.domain.pool import (
    Departure,
    Heartbeat,
    MemberCondition,
    MembershipDelta,
    MemberStatus,
    Order,
    OrderKind,
    PoolStatus,
    Registration,
    Removal,
    Watch,
    served,
)
from triptych.domain.stage import Role
from triptych.machine.pool_manager.limits_order import LimitsOrder
from triptych.machine.pool_manager.member_events import (
    DrainWanted,
    EndSession,
    FarewellReceived,
    HeartbeatReceived,
    MemberEffect,
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
    SwitchOutcome,
)
from triptych.machine.pool_manager.switch_order import SwitchOrder

_NO_LOAD = InstanceLoad({})


@dataclass(frozen=True, slots=True)
class MemberLimits:
    """Number of members, and when silence counts."""

    max_members: Positive = MAX_MEMBERS
    """Most members; one more is refused."""
    suspect_s: PositiveSeconds = 3.0
    """A member that sends nothing for this long is suspected."""
    remove_s: PositiveSeconds = 10.0
    """A member that sends nothing for this long is removed."""
    tick_s: PositiveSeconds = 0.5
    """Interval of the checks for silence, seconds. If this process itself was stopped for longer, the members are not
    to blame.
    """
    max_departures: Positive = 4096
    """Departures that are remembered for watchers; one that has missed more gets the whole list."""

    def __post_init__(self) -> None:
        check_limits(self, ("tick_s", "suspect_s"), ("suspect_s", "remove_s"))
        if self.max_members > MAX_MEMBERS:
            raise ValueError(f"max_members is {self.max_members}, must be at most {MAX_MEMBERS}")


@dataclass(slots=True)
class _Member:
    registration: Registration
    session: int | None
    heard_s: float
    since_s: float
    """Time since which the condition holds."""
    version: int = 0
    """The list's version at its last change."""
    condition: MemberCondition = MemberCondition.ACTIVE
    suspected: bool = False
    ordered: bool = False
    """Whether the member was ordered to drain."""
    sequence: int = -1
    load: InstanceLoad = _NO_LOAD
    open_since_s: float = 0.0
    """Time since which the open stages are open."""
    switch: SwitchOrder | None = None
    limits: LimitsOrder | None = None

    @property
    def pending(self) -> SwitchOrder | None:
        """The last order to switch, until it is obeyed."""
        return None if self.switch is None or self.switch.obeyed else self.switch

    @property
    def is_there(self) -> bool:
        """Whether its process is provably running."""
        return self.session is not None and not self.suspected

    @property
    def listed(self) -> Member:
        registration = self.registration
        state = MemberState.ACTIVE if self.condition is MemberCondition.ACTIVE else MemberState.LEAVING
        return Member(
            registration.address,
            state,
            registration.role,
            registration.model,
            registration.epoch,
            registration.kind,
            self.suspected,
        )


@dataclass(frozen=True, slots=True)
class _Departed:
    version: int
    kind: MemberKind
    model: str
    removal: Removal


class MembersMachine:
    """Owner of the members. ``handle`` is the only mutator."""

    def __init__(self, limits: MemberLimits, *, incarnation: int, now_s: float) -> None:
        self.incarnation = incarnation
        self._limits = limits
        self._members: dict[str, _Member] = {}
        """Members by instance id, those that changed last at the end."""
        self._by_address: dict[str, str] = {}
        self._by_session: dict[int, str] = {}
        """The instance id of each session that is its member's current one."""
        self._departed: deque[_Departed] = deque(maxlen=limits.max_departures)
        self._limits_by_hand: dict[str, LimitsOrder] = {}
        """Limits by hand of members that were lost, by instance id: a process that takes its place gets them too."""
        self._forgotten = 0
        """Departures up to this version are no longer remembered."""
        self._version = 1
        self._last_tick_s = now_s
        self.silences: Counter[tuple[str, ...]] = Counter()
        """Members that were silent since the start, by role (empty for routers) and what came of it: ``suspected``, ``removed``."""

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Rises with every change that watchers should learn of."""
        return self._version

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._members

    @property
    def sessions(self) -> int:
        """Number of sessions that belong to a member."""
        return len(self._by_session)

    def has_session(self, session: int) -> bool:
        """Whether the session belongs to a member: it has registered one, which is still listed and has no newer
        session.
        """
        return session in self._by_session

    def router_of(self, session: int) -> Registration | None:
        """The router that this session belongs to; None for an instance, and for a session without a member."""
        name = self._by_session.get(session)
        registration = None if name is None else self._members[name].registration
        return registration if registration is not None and registration.kind is MemberKind.ROUTER else None

    def since(self, watch: Watch) -> MembershipDelta:
        """Changes that a watcher does not know yet."""
        known = watch.version
        if watch.incarnation != self.incarnation or not self._forgotten <= known <= self._version:
            listed = tuple(member.listed for member in self._wanted(watch, 0))
            return MembershipDelta(self.incarnation, self._version, full=True, members=listed)
        removed = tuple(
            departed.removal
            for departed in takewhile(lambda departed: departed.version > known, reversed(self._departed))
            if watch.wants(departed.kind, departed.model)
        )
        changed = tuple(member.listed for member in self._wanted(watch, known))
        return MembershipDelta(self.incarnation, self._version, members=changed, removed=removed[::-1])

    def _wanted(self, watch: Watch, after: int) -> Iterable[_Member]:
        return (
            member
            for member in takewhile(lambda member: member.version > after, reversed(self._members.values()))
            if watch.wants(member.registration.kind, member.registration.model)
        )

    def pools(self, now_s: float) -> tuple[PoolStatus, ...]:
        """Members by model, role and tier."""
        pools: dict[tuple[str, str], list[MemberStatus]] = {}
        for member in self._members.values():
            registration = member.registration
            status = MemberStatus(
                registration,
                member.condition,
                member.suspected,
                member.load,
                since_s=max(0.0, now_s - member.since_s),
                heard_s=max(0.0, now_s - member.heard_s),
                wanted=None if member.switch is None else member.switch.role,
                wanted_s=0.0 if member.switch is None else max(0.0, now_s - member.switch.since_s),
                open_s=max(0.0, now_s - member.open_since_s),
                served_s=None if member.switch is None else member.switch.served_s,
            )
            pools.setdefault((registration.model, _kind_of(registration)), []).append(status)
        return tuple(
            PoolStatus(
                model,
                members[0].registration.role,
                tuple(sorted(members, key=_by_id)),
                tier=kind.partition("@")[2],
            )
            for (model, kind), members in sorted(pools.items())
        )

    def switches_pending_s(self, now_s: float) -> dict[str, float]:
        """Age of the oldest order to switch that is not obeyed by model, seconds; 0 without one. Models of which no
        member can switch are left out.
        """
        return self._longest_s(now_s, lambda member: None if member.pending is None else member.pending.since_s)

    def switches_unserved_s(self, now_s: float) -> dict[str, float]:
        """Longest time, by model, that a stage which an order has opened has had work and served nothing, seconds.
        Models as above.
        """
        return self._longest_s(now_s, lambda member: None if member.switch is None else member.switch.waits_since_s)

    def _longest_s(self, now_s: float, since_s: Callable[[_Member], float | None]) -> dict[str, float]:
        longest_s: dict[str, float] = {}
        for member in self._members.values():
            if member.registration.switchable is not None:
                began_s = since_s(member)
                model, lasts_s = member.registration.model, 0.0 if began_s is None else max(0.0, now_s - began_s)
                longest_s[model] = max(lasts_s, longest_s.get(model, 0.0))
        return longest_s

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        addresses = {member.registration.address: name for name, member in self._members.items()}
        assert addresses == self._by_address, "an address belongs to more than one member, or to none"
        sessions = {member.session: name for name, member in self._members.items() if member.session is not None}
        assert sessions == self._by_session, "a session belongs to more than one member, or to none"
        assert len(self._members) <= self._limits.max_members, "more members than allowed"
        for name, member in self._members.items():
            assert name == member.registration.instance_id, "a member is filed under another name"
            assert 0 < member.version <= self._version, "a member has a version that the list never had"
        changes = [member.version for member in self._members.values()]
        assert changes == sorted(changes), "members are out of order"
        versions = [departed.version for departed in self._departed]
        assert versions == sorted(versions), "departures are out of order"
        assert all(self._forgotten < version <= self._version for version in versions), "a departure is misfiled"

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: MemberEvent, now_s: float) -> list[MemberEffect]:
        before = self._version
        match event:
            case Registered(session, registration):
                effects = self._registered(session, registration, now_s)
            case HeartbeatReceived(session, heartbeat):
                effects = self._heartbeat(session, heartbeat, now_s)
            case FarewellReceived(session, reason):
                effects = self._farewell(session, reason, now_s)
            case SessionEnded(session):
                effects = self._session_ended(session)
            case DrainWanted(instance_id, reason):
                effects = self._drain(instance_id, reason, now_s)
            case MemberSwitchWanted(instance_id, role, reason):
                effects = self._switch(instance_id, role, reason, now_s)
            case MemberLimitsWanted(instance_id):
                effects = self._want_limits(self._members.get(instance_id), event)
            case MembersTick():
                effects = self._tick(now_s)
        if self._version != before:
            effects.append(MembersChanged(self._version))
        return effects

    def _registered(self, session: int, new: Registration, now_s: float) -> list[MemberEffect]:
        name = new.instance_id
        if self._by_session.get(session, name) != name:
            return [EndSession(session, "a stream registers one member only")]
        old = self._members.get(name)
        if old is not None and old.registration.epoch > new.epoch and old.is_there:
            return [EndSession(session, f"a newer process has the instance id {name!r}")]
        owner = self._by_address.get(new.address, name)
        if owner != name and self._members[owner].is_there:
            return [EndSession(session, f"the address of {name!r} belongs to {owner!r}")]
        if old is None and owner == name and len(self._members) >= self._limits.max_members:
            return [EndSession(session, f"there are {self._limits.max_members} members, which is the limit")]
        effects: list[MemberEffect] = []
        if owner != name:
            effects += self._remove(owner, Departure.LEFT, now_s)
            effects.append(MemberLogged(owner, f"replaced at its address by {name}"))
        accepted = SendOrder(session, Order(OrderKind.REGISTERED))
        if old is not None and old.registration == new:
            return [*effects, *self._resumed(old, session, now_s), accepted]
        if old is not None:
            if old.session not in (None, session):
                effects.append(EndSession(old.session, "another process has registered with this instance id"))
            effects += self._remove(name, Departure.LEFT, now_s)
        member = self._members[name] = _Member(new, session, heard_s=now_s, since_s=now_s, open_since_s=now_s)
        member.limits = self._limits_by_hand.pop(name, None)
        if old is not None and old.limits is not None:
            member.limits = old.limits.again()
        self._by_address[new.address] = name
        self._by_session[session] = name
        self._count_silence(member, suspected=0, removed=0)  # so that both are known from the start
        self._changed(member)
        event_text = "joined" if old is None else "joined again"
        return [*effects, MemberLogged(name, f"{event_text} at {new.address} as {_kind(new)} of {new.model}"), accepted]

    def _resumed(self, member: _Member, session: int, now_s: float) -> list[MemberEffect]:
        """The same process registers again, on the same stream or another."""
        effects: list[MemberEffect] = []
        if member.session is not None and member.session != session:
            del self._by_session[member.session]
            effects.append(EndSession(member.session, "the member has opened another stream"))
        member.session, member.sequence = session, -1
        self._by_session[session] = member.registration.instance_id
        effects += self._heard(member, now_s)
        if member.ordered:
            effects.append(SendOrder(session, Order(OrderKind.DRAIN, "ordered before")))
        return effects

    def _heartbeat(self, session: int, heartbeat: Heartbeat, now_s: float) -> list[MemberEffect]:
        name = self._by_session.get(session)
        if name is None:
            return [SendOrder(session, Order(OrderKind.REREGISTER, "the member is not known"))]
        member = self._members[name]
        if heartbeat.sequence <= member.sequence:
            return []
        if heartbeat.load.stages.keys() != member.load.stages.keys():
            member.open_since_s = now_s
        is_first, switch = member.sequence < 0, member.switch
        member.sequence, member.load = heartbeat.sequence, heartbeat.load
        effects = self._heard(member, now_s)
        if switch is not None:
            effects += self._switching(member, switch, now_s, is_first=is_first)
        if member.limits is not None and heartbeat.load.limits is not None:
            effects += self._limiting(member, member.limits, heartbeat.load.limits, is_first=is_first)
        condition = MemberCondition.ACTIVE
        if heartbeat.drained:
            condition = MemberCondition.DRAINED
        elif heartbeat.load.draining or member.ordered:
            condition = MemberCondition.LEAVING
        return effects + self._enter(member, condition, now_s, "as it says")

    def _switching(self, member: _Member, switch: SwitchOrder, now_s: float, *, is_first: bool) -> list[MemberEffect]:
        """What the member's load says of its order to switch. ``is_first``: it is the first load of the session."""
        name, load = member.registration.instance_id, member.load
        if switch.is_overtaken(load):
            effects = _ended(member, SwitchOutcome.OVERTAKEN, now_s)
            member.switch = None
            return effects
        if switch.is_obeyed(load):
            effects = _ended(member, SwitchOutcome.OBEYED, now_s)
            switch.obeyed = True
            return [*effects, *switch.check_served(load, now_s)]
        if fault := switch.fault(load):
            effects = _ended(member, SwitchOutcome.GIVEN_UP, now_s)
            member.switch = None
            return [*effects, MemberLogged(name, f"does not switch to role {switch.role.value}: {fault}")]
        return self._send_switch(member, switch) if is_first and switch.is_unknown(load) else []

    def _heard(self, member: _Member, now_s: float) -> list[MemberEffect]:
        member.heard_s = now_s
        if not member.suspected:
            return []
        member.suspected = False
        self._changed(member)
        return [MemberLogged(member.registration.instance_id, "is heard again")]

    def _enter(self, member: _Member, condition: MemberCondition, now_s: float, why: str) -> list[MemberEffect]:
        if member.condition is condition:
            return []
        was, member.condition, member.since_s = member.listed, condition, now_s
        if member.listed != was:
            self._changed(member)
        return [MemberLogged(member.registration.instance_id, f"is {condition}, {why}")]

    def _farewell(self, session: int, reason: str, now_s: float) -> list[MemberEffect]:
        name = self._by_session.get(session)
        if name is None:
            return []
        effects = self._remove(name, Departure.LEFT, now_s)
        return [*effects, MemberLogged(name, f"left: {reason}" if reason else "left")]

    def _session_ended(self, session: int) -> list[MemberEffect]:
        """End a session. That is not a departure yet: the member may open another stream."""
        name = self._by_session.pop(session, None)
        if name is None:
            return []
        self._members[name].session = None
        return [MemberLogged(name, "has lost its stream")]

    def _drain(self, instance_id: str, reason: str, now_s: float) -> list[MemberEffect]:
        member = self._members.get(instance_id)
        if member is None:
            return []
        effects: list[MemberEffect] = []
        if not member.ordered and member.session is not None:
            effects.append(SendOrder(member.session, Order(OrderKind.DRAIN, reason)))
        member.ordered = True
        if member.condition is MemberCondition.ACTIVE:
            effects += self._enter(member, MemberCondition.LEAVING, now_s, f"as ordered: {reason}")
        return effects

    def _switch(self, instance_id: str, role: Role, reason: str, now_s: float) -> list[MemberEffect]:
        member = self._members.get(instance_id)
        if member is None or (widest := member.registration.switchable) is None or not widest.serves(*role.stages):
            return []
        sent = 0 if member.switch is None else member.switch.version
        effects = _ended(member, SwitchOutcome.OVERTAKEN, now_s)
        source = Role.of(served(member.registration, member.load) or widest.stages)
        member.switch = SwitchOrder(source, role, reason, now_s)
        effects.append(MemberLogged(instance_id, f"is to switch to role {role.value}, as ordered: {reason}"))
        if member.sequence >= 0:
            member.switch.version = sent
            effects += self._send_switch(member, member.switch)
        return effects

    def _send_switch(self, member: _Member, switch: SwitchOrder) -> list[MemberEffect]:
        """Send an order to switch, with a version above all that the member knows."""
        switch.version = max(switch.version, member.load.stages_version) + 1
        if member.session is None:
            return []
        return [SendOrder(member.session, Order(OrderKind.SWITCH, switch.reason, switch.role, switch.version))]

    def _want_limits(self, member: _Member | None, wanted: MemberLimitsWanted) -> list[MemberEffect]:
        if member is None or (report := member.load.limits) is None:
            return []
        sent = 0 if member.limits is None else member.limits.version
        member.limits = LimitsOrder(wanted.limits, wanted.by_hand, wanted.reason)
        if member.sequence < 0:  # the first heartbeat of the stream is to come
            return []
        member.limits.version = sent
        return self._send_limits(member, member.limits, report)

    def _limiting(
        self, member: _Member, order: LimitsOrder, report: LimitsReport, *, is_first: bool
    ) -> list[MemberEffect]:
        """What the member's load says of its order of limits. ``is_first``: it is the first load of the session."""
        if order.is_overtaken(report):
            member.limits = None
            return []
        if order.is_unknown(report):
            return self._send_limits(member, order, report) if is_first or not order.version else []
        if order.answered:
            return []
        order.answered = True
        answer = f"refuses limits ({order.limits}): {report.fault}" if report.fault else f"has limits: {report.limits}"
        return [MemberLogged(member.registration.instance_id, answer)]

    def _send_limits(self, member: _Member, order: LimitsOrder, report: LimitsReport) -> list[MemberEffect]:
        """Send an order of limits, with a version above all that the member knows."""
        order.version = max(order.version, report.version) + 1
        if member.session is None:
            return []
        sent = Order(OrderKind.LIMITS, order.reason, version=order.version, limits=order.limits, by_hand=order.by_hand)
        return [SendOrder(member.session, sent)]

    def _tick(self, now_s: float) -> list[MemberEffect]:
        late_s = now_s - self._last_tick_s - 2 * self._limits.tick_s
        self._last_tick_s = now_s
        if late_s > 0:  # this process was stopped, and has not read what the members sent meanwhile
            for member in self._members.values():
                member.heard_s = min(now_s, member.heard_s + late_s)
        effects: list[MemberEffect] = []
        for name, member in list(self._members.items()):
            silent_s = now_s - member.heard_s
            if silent_s >= self._limits.remove_s:
                effects += self._remove(name, Departure.LOST, now_s)
                self._count_silence(member, removed=1)
                effects.append(MemberLogged(name, f"removed after {silent_s:.3g} s silence"))
            elif silent_s >= self._limits.suspect_s and not member.suspected:
                member.suspected = True
                self._count_silence(member, suspected=1)
                self._changed(member)
                effects.append(MemberLogged(name, f"suspected after {silent_s:.3g} s silence"))
        return effects

    # --- changes -----------------------------------------------------------------------------------------------------

    def _changed(self, member: _Member) -> None:
        self._version += 1
        member.version = self._version
        name = member.registration.instance_id
        self._members[name] = self._members.pop(name)

    def _count_silence(self, member: _Member, **outcomes: int) -> None:
        role = member.registration.role
        self.silences.update(
            {("" if role is None else role.value, outcome): number for outcome, number in outcomes.items()}
        )

    def _remove(self, name: str, departure: Departure, now_s: float) -> list[MemberEffect]:
        member = self._members.pop(name)
        del self._by_address[member.registration.address]
        if member.session is not None:
            del self._by_session[member.session]
        self._version += 1
        if len(self._departed) == self._departed.maxlen:
            self._forgotten = self._departed[0].version
        if departure is Departure.LOST and member.limits is not None and member.limits.by_hand:
            self._limits_by_hand[name] = member.limits.again()
            if len(self._limits_by_hand) > self._limits.max_members:
                del self._limits_by_hand[next(iter(self._limits_by_hand))]
        registration = member.registration
        self._departed.append(
            _Departed(self._version, registration.kind, registration.model, Removal(registration.address, departure))
        )
        return _ended(member, SwitchOutcome.LOST, now_s)


def _ended(member: _Member, outcome: SwitchOutcome, now_s: float) -> list[MemberEffect]:
    """End the order to switch that is pending; nothing without one."""
    if (switch := member.pending) is None:
        return []
    after_s = max(0.0, now_s - switch.since_s)
    return [SwitchEnded(member.registration.model, switch.source, switch.role, outcome, after_s)]


def _kind_of(registration: Registration) -> str:
    """Role and tier; empty for a router."""
    return "" if registration.pool is None else registration.pool.kind


def _by_id(status: MemberStatus) -> str:
    return status.registration.instance_id


def _kind(registration: Registration) -> str:
    return (
        registration.kind.value if registration.role is None else f"{registration.kind.value} {registration.role.value}"
    )
