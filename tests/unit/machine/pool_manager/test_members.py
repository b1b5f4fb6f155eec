"""Members of a pool manager: who is listed, in which state, and what watchers are told."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.examples import examples
from triptych.domain.instance import ClosedStage, InstanceLimits, InstanceLoad, LimitsReport, StageLoad
from triptych.domain.membership import Member, MemberKind, MemberState
from triptych.domain.pool import (
    Departure,
    Heartbeat,
    MemberCondition,
    Order,
    OrderKind,
    Registration,
    Removal,
    Watch,
)
from triptych.domain.stage import Role, Stage
from triptych.machine.membership_view import MembershipView, ViewLimits
from triptych.machine.pool_manager.member_events import (
    DrainWanted,
    EndSession,
    FarewellReceived,
    HeartbeatReceived,
    MemberLimitsWanted,
    MembersChanged,
    MembersTick,
    MemberSwitchWanted,
    Registered,
    SendOrder,
    SessionEnded,
    SwitchEnded,
    SwitchOutcome,
    SwitchServed,
)
from triptych.machine.pool_manager.members import MemberLimits, MembersMachine

LIMITS = MemberLimits(max_members=3, suspect_s=3, remove_s=10, tick_s=0.5)
REGISTERED, REREGISTER = Order(OrderKind.REGISTERED), OrderKind.REREGISTER
LOAD = InstanceLoad({Stage.ENCODE: StageLoad(5, 1)})
DRAINING = InstanceLoad({}, draining=True)


def registration(name: str = "a", epoch: int = 1, address: str = "", **changes: Any) -> Registration:
    made = Registration(MemberKind.INSTANCE, name, epoch, address or f"{name}:1", "m", role=Role.E)
    return replace(made, **changes)


def member(name: str = "a", epoch: int = 1, **changes: Any) -> Member:
    return replace(Member(f"{name}:1", role=Role.E, model="m", epoch=epoch), **changes)


class Manager:
    """The machine, with a clock that ticks as it does in a process."""

    def __init__(self, limits: MemberLimits = LIMITS) -> None:
        self.machine = MembersMachine(limits, incarnation=7, now_s=0.0)
        self.now_s = 0.0

    def handle(self, event: Any) -> list[Any]:
        effects = self.machine.handle(event, self.now_s)
        self.machine.validate()
        return effects

    def passes(self, seconds: float, *heard: int) -> None:
        """Let time pass; the sessions in ``heard`` send heartbeats."""
        for _ in range(round(seconds / LIMITS.tick_s)):
            self.now_s += LIMITS.tick_s
            for session in heard:
                self.beats(session)
            self.handle(MembersTick())

    def beats(self, session: int, load: InstanceLoad = LOAD, *, drained: bool = False) -> list[Any]:
        return self.handle(HeartbeatReceived(session, Heartbeat(int(self.now_s * 1000), load, drained)))

    def joins(self, session: int, **told: Any) -> list[Any]:
        return self.handle(Registered(session, registration(**told)))

    @property
    def listed(self) -> dict[str, Member]:
        return {member.address: member for member in self.machine.since(Watch()).members}

    @property
    def conditions(self) -> dict[str, MemberCondition]:
        pools = self.machine.pools(self.now_s)
        return {member.registration.instance_id: member.condition for pool in pools for member in pool.members}


@pytest.fixture
def manager() -> Manager:
    return Manager()


def orders(effects: list[Any]) -> list[tuple[int, OrderKind]]:
    return [(effect.session, effect.order.kind) for effect in effects if isinstance(effect, SendOrder)]


def ended(effects: list[Any]) -> list[int]:
    return [effect.session for effect in effects if isinstance(effect, EndSession)]


def test_one_that_registers_is_listed_and_told_so(manager: Manager) -> None:
    effects = manager.joins(1)
    assert orders(effects) == [(1, OrderKind.REGISTERED)]
    assert effects[-1] == MembersChanged(manager.machine.version)
    assert manager.listed == {"a:1": member()}


def test_its_load_is_in_the_status_with_the_times_since_when(manager: Manager) -> None:
    manager.joins(1)
    manager.passes(2, 1)
    manager.now_s += 0.25
    (pool,) = manager.machine.pools(manager.now_s)
    (status,) = pool.members
    assert (pool.model, pool.role) == ("m", Role.E)
    assert (status.load, status.condition, status.suspected) == (LOAD, MemberCondition.ACTIVE, False)
    assert (status.since_s, status.heard_s) == (2.25, 0.25)


def test_silence_makes_it_suspected_then_removes_it(manager: Manager) -> None:
    manager.joins(1)
    manager.passes(2.5)
    assert manager.listed == {"a:1": member()}
    manager.passes(0.5)
    assert manager.listed == {"a:1": member(suspected=True)}
    manager.passes(6.5)
    assert manager.listed == {"a:1": member(suspected=True)}
    known = manager.machine.version
    manager.passes(0.5)
    assert manager.listed == {}
    assert manager.machine.since(Watch(7, known)).removed == (Removal("a:1", Departure.LOST),)


def test_silences_are_counted_from_zero_on_by_what_came_of_them(manager: Manager) -> None:
    manager.joins(1)
    role = manager.machine.pools(manager.now_s)[0].role
    of_role = "" if role is None else role.value
    assert manager.machine.silences == {(of_role, "suspected"): 0, (of_role, "removed"): 0}
    manager.passes(5)
    manager.beats(1)
    assert manager.machine.silences == {(of_role, "suspected"): 1, (of_role, "removed"): 0}
    manager.passes(10)
    assert manager.machine.silences == {(of_role, "suspected"): 2, (of_role, "removed"): 1}


def test_one_that_is_heard_again_is_no_longer_suspected(manager: Manager) -> None:
    manager.joins(1)
    manager.passes(5)
    manager.beats(1)
    assert manager.listed == {"a:1": member()}


def test_one_that_was_removed_but_still_sends_is_told_to_register_again(manager: Manager) -> None:
    manager.joins(1)
    manager.passes(10)
    assert orders(manager.beats(1)) == [(1, REREGISTER)]
    manager.joins(1)
    assert manager.listed == {"a:1": member()}


def test_the_time_during_which_the_manager_itself_was_stopped_is_nobodys_silence(manager: Manager) -> None:
    manager.joins(1)
    manager.passes(1, 1)
    manager.now_s += 3600
    manager.handle(MembersTick())
    assert manager.listed == {"a:1": member()}
    manager.passes(10)
    assert manager.listed == {}


def test_a_closed_stream_is_no_departure_and_the_same_process_may_open_another(manager: Manager) -> None:
    manager.joins(1)
    manager.handle(SessionEnded(1))
    before = manager.machine.version
    assert manager.listed == {"a:1": member()}
    assert orders(manager.joins(2)) == [(2, OrderKind.REGISTERED)]
    assert manager.machine.version == before, "watchers need not know"


def test_a_second_stream_of_the_same_process_closes_the_first(manager: Manager) -> None:
    manager.joins(1)
    assert ended(manager.joins(2)) == [1]
    manager.handle(SessionEnded(1))
    manager.passes(5, 2)
    assert manager.listed == {"a:1": member()}


@pytest.mark.parametrize("address", ["a:1", "elsewhere:1"])
def test_a_restarted_process_replaces_the_old_one_at_once(manager: Manager, address: str) -> None:
    manager.joins(1)
    known = manager.machine.version
    assert ended(manager.joins(2, epoch=2, address=address)) == [1]
    assert manager.listed == {address: member(epoch=2, address=address)}
    delta = manager.machine.since(Watch(7, known))
    assert delta.removed == (Removal("a:1", Departure.LEFT),)
    assert delta.members == (member(epoch=2, address=address),)


def test_an_older_process_is_refused_while_the_newer_one_is_there_and_accepted_when_it_is_not(manager: Manager) -> None:
    manager.joins(1, epoch=5)
    assert ended(manager.joins(2, epoch=4)) == [2]
    assert manager.listed["a:1"].epoch == 5
    manager.handle(SessionEnded(1))  # a restart after which the machine's clock is behind
    assert ended(manager.joins(3, epoch=4)) == []
    assert manager.listed["a:1"].epoch == 4


def test_an_address_goes_to_another_instance_only_when_the_owner_is_not_there(manager: Manager) -> None:
    manager.joins(1)
    assert ended(manager.joins(2, name="b", address="a:1")) == [2]
    manager.passes(3)
    manager.joins(2, name="b", address="a:1")
    assert manager.conditions == {"b": MemberCondition.ACTIVE}
    assert orders(manager.beats(1)) == [(1, REREGISTER)]
    assert ended(manager.joins(1)) == [1]


def test_a_stream_registers_one_member_only(manager: Manager) -> None:
    manager.joins(1)
    assert ended(manager.joins(1, name="b")) == [1]
    assert manager.listed == {"a:1": member()}


def test_a_session_belongs_to_a_router_only_if_that_is_what_registered(manager: Manager) -> None:
    router = registration("r", kind=MemberKind.ROUTER, role=None)
    manager.handle(Registered(1, registration("a")))
    manager.handle(Registered(2, router))
    assert [manager.machine.router_of(session) for session in (1, 2, 3)] == [None, router, None]
    manager.handle(SessionEnded(2))
    assert manager.machine.router_of(2) is None


def test_one_member_more_than_allowed_is_refused(manager: Manager) -> None:
    for session, name in enumerate("abc"):
        manager.joins(session, name=name)
    assert ended(manager.joins(9, name="d")) == [9]
    manager.handle(FarewellReceived(0, "scaled down"))
    assert ended(manager.joins(9, name="d")) == []


def test_a_farewell_removes_it_at_once(manager: Manager) -> None:
    manager.joins(1)
    known = manager.machine.version
    manager.handle(FarewellReceived(1, ""))
    assert manager.listed == {}
    assert manager.machine.since(Watch(7, known)).removed == (Removal("a:1", Departure.LEFT),)
    assert manager.handle(SessionEnded(1)) == []


def test_one_that_drains_by_itself_is_leaving_then_drained_and_may_come_back(manager: Manager) -> None:
    leaving = member(state=MemberState.LEAVING)
    manager.joins(1)
    manager.passes(1)
    manager.beats(1, DRAINING)
    assert (manager.listed, manager.conditions) == ({"a:1": leaving}, {"a": MemberCondition.LEAVING})
    known = manager.machine.version
    manager.passes(0.5)
    manager.beats(1, DRAINING, drained=True)
    assert (manager.listed, manager.conditions) == ({"a:1": leaving}, {"a": MemberCondition.DRAINED})
    assert manager.machine.version == known, "watchers need not know"
    manager.passes(0.5)
    manager.beats(1)
    assert manager.listed == {"a:1": member()}


def test_one_that_is_ordered_to_drain_is_leaving_at_once_and_told_once(manager: Manager) -> None:
    manager.joins(1)
    assert orders(manager.handle(DrainWanted("a", "test"))) == [(1, OrderKind.DRAIN)]
    assert manager.listed == {"a:1": member(state=MemberState.LEAVING)}
    assert manager.handle(DrainWanted("a", "test")) == []
    manager.passes(1, 1)
    assert manager.conditions == {"a": MemberCondition.LEAVING}, "whatever it reports before it obeys"


def test_an_order_to_drain_that_could_not_be_sent_is_sent_on_the_next_stream(manager: Manager) -> None:
    manager.joins(1)
    manager.handle(SessionEnded(1))
    assert orders(manager.handle(DrainWanted("a", "test"))) == []
    assert orders(manager.joins(2)) == [(2, OrderKind.DRAIN), (2, OrderKind.REGISTERED)]
    assert manager.handle(DrainWanted("unknown", "test")) == []


SWITCHABLE: dict[str, Any] = {"role": Role.PD, "switchable": Role.EPD}


def told(*stages: Stage, version: int = 0) -> InstanceLoad:
    return InstanceLoad({stage: StageLoad(0, 0) for stage in stages}, stages_version=version)


def switches(effects: list[Any]) -> list[tuple[Role | None, int]]:
    return [
        (effect.order.role, effect.order.version)
        for effect in effects
        if isinstance(effect, SendOrder) and effect.order.kind is OrderKind.SWITCH
    ]


def switches_ended(effects: list[Any]) -> list[SwitchEnded]:
    return [effect for effect in effects if isinstance(effect, SwitchEnded)]


def switching(manager: Manager) -> None:
    """Member a serves PD, and is ordered to serve D."""
    manager.handle(Registered(1, registration(**SWITCHABLE)))
    manager.handle(HeartbeatReceived(1, Heartbeat(1, told(*Role.PD.stages))))
    manager.handle(MemberSwitchWanted("a", Role.D, "on purpose"))


def status_of(manager: Manager) -> Any:
    ((status,),) = [pool.members for pool in manager.machine.pools(manager.now_s)]
    return status


def test_an_order_to_switch_has_a_version_above_all_that_the_member_knows(manager: Manager) -> None:
    manager.handle(Registered(1, registration(**SWITCHABLE)))
    manager.handle(HeartbeatReceived(1, Heartbeat(1, told(*Role.PD.stages, version=4))))
    assert switches(manager.handle(MemberSwitchWanted("a", Role.D, "on purpose"))) == [(Role.D, 5)]
    assert switches(manager.handle(MemberSwitchWanted("a", Role.E, "on purpose"))) == [(Role.E, 6)]
    status = status_of(manager)
    assert (status.wanted, status.open, status.stays_open, status.is_as_wanted) == (
        Role.E,
        Role.PD.stages,
        frozenset(),
        False,
    )
    manager.now_s += 2.0
    manager.handle(HeartbeatReceived(1, Heartbeat(2, told(Stage.ENCODE, version=6))))
    manager.now_s += 1.0
    status = status_of(manager)
    assert (status.open, status.is_as_wanted, status.wanted_s, status.open_s) == (Role.E.stages, True, 3.0, 1.0)
    assert status.registration.role is Role.PD, "its pool stays that of its start"


def test_an_order_that_the_member_has_given_up_is_over(manager: Manager) -> None:
    manager.handle(Registered(1, registration(**SWITCHABLE)))
    manager.handle(HeartbeatReceived(1, Heartbeat(1, told(*Role.PD.stages))))
    assert switches(manager.handle(MemberSwitchWanted("a", Role.E, "on purpose"))) == [(Role.E, 1)]
    opening = replace(told(*Role.PD.stages, version=1), closed=(ClosedStage(Stage.ENCODE, 3.0),))
    manager.handle(HeartbeatReceived(1, Heartbeat(2, opening)))
    assert status_of(manager).wanted is Role.E, "it is loading"
    failed = replace(opening, closed=(ClosedStage(Stage.ENCODE, 3.0, "no memory"),))
    assert "does not switch to role E: no memory" in str(manager.handle(HeartbeatReceived(1, Heartbeat(3, failed))))
    status = status_of(manager)
    assert (status.wanted, status.is_as_wanted, status.load.closed[0].fault) == (None, True, "no memory")
    manager.handle(SessionEnded(1))
    manager.handle(Registered(2, registration(**SWITCHABLE)))
    assert switches(manager.handle(HeartbeatReceived(2, Heartbeat(1, failed)))) == [], "it is not ordered again"


def test_an_order_to_switch_is_sent_when_the_member_has_reported_and_again_on_a_new_stream(manager: Manager) -> None:
    manager.handle(Registered(1, registration(**SWITCHABLE)))
    assert switches(manager.handle(MemberSwitchWanted("a", Role.D, "on purpose"))) == []
    first = told(*Role.PD.stages, version=2)
    assert switches(manager.handle(HeartbeatReceived(1, Heartbeat(1, first)))) == [(Role.D, 3)]
    assert switches(manager.handle(HeartbeatReceived(1, Heartbeat(2, first)))) == []
    manager.handle(SessionEnded(1))
    manager.handle(Registered(2, registration(**SWITCHABLE)))
    assert switches(manager.handle(HeartbeatReceived(2, Heartbeat(1, first)))) == [(Role.D, 4)]
    manager.handle(SessionEnded(2))
    manager.handle(Registered(3, registration(**SWITCHABLE)))
    obeyed = told(Stage.DECODE, version=4)
    assert switches(manager.handle(HeartbeatReceived(3, Heartbeat(1, obeyed)))) == []


def test_what_another_manager_ordered_since_counts(manager: Manager) -> None:
    manager.handle(Registered(1, registration(**SWITCHABLE)))
    manager.handle(HeartbeatReceived(1, Heartbeat(1, told(*Role.PD.stages))))
    manager.handle(MemberSwitchWanted("a", Role.D, "on purpose"))
    manager.handle(HeartbeatReceived(1, Heartbeat(2, told(Stage.PREFILL, version=2))))
    assert status_of(manager).wanted is None


def test_an_order_to_switch_ends_once_when_the_member_reports_the_stages_under_its_version(manager: Manager) -> None:
    switching(manager)
    manager.now_s += 2.0
    assert manager.machine.switches_pending_s(manager.now_s) == {"m": 2.0}
    for sequence, load in enumerate((told(Stage.DECODE), told(*Role.PD.stages, version=1)), 2):
        assert not switches_ended(manager.handle(HeartbeatReceived(1, Heartbeat(sequence, load)))), (
            "one of the two is missing"
        )
    obeys = told(Stage.DECODE, version=1)
    found = switches_ended(manager.handle(HeartbeatReceived(1, Heartbeat(4, obeys))))
    assert found == [SwitchEnded("m", Role.PD, Role.D, SwitchOutcome.OBEYED, 2.0)]
    assert manager.machine.switches_pending_s(manager.now_s) == {"m": 0.0}
    assert not switches_ended(manager.handle(HeartbeatReceived(1, Heartbeat(5, obeys))))
    assert not switches_ended(manager.handle(MemberSwitchWanted("a", Role.P, "on purpose"))), "the last one had ended"
    again = switches_ended(manager.handle(HeartbeatReceived(1, Heartbeat(6, told(Stage.PREFILL, version=2)))))
    assert [(switch.source, switch.target) for switch in again] == [(Role.D, Role.P)]


def test_an_order_is_verified_by_the_first_that_each_opened_stage_serves(manager: Manager) -> None:
    manager.handle(Registered(1, registration(**SWITCHABLE)))
    manager.handle(HeartbeatReceived(1, Heartbeat(1, told(*Role.E.stages))))
    manager.handle(MemberSwitchWanted("a", Role.PD, "on purpose"))

    def reports(sequence: int, prefill: StageLoad, decode: StageLoad) -> list[SwitchServed]:
        load = InstanceLoad({Stage.PREFILL: prefill, Stage.DECODE: decode}, stages_version=1)
        effects = manager.handle(HeartbeatReceived(1, Heartbeat(sequence, load)))
        return [effect for effect in effects if isinstance(effect, SwitchServed)]

    def unserved_s() -> float:
        return manager.machine.switches_unserved_s(manager.now_s)["m"]

    empty, works, has_served = StageLoad(0, 0, served=0), StageLoad(5, 1, served=0), StageLoad(0, 0, served=1)
    assert reports(2, empty, empty) == []
    manager.now_s += 9.0
    assert unserved_s() == 0, "nothing has come"
    assert reports(3, works, empty) == []
    manager.now_s += 2.0
    assert unserved_s() == 2.0
    assert reports(4, has_served, works) == []
    assert (unserved_s(), status_of(manager).served_s) == (2.0, None)
    assert reports(5, has_served, empty) == []
    assert unserved_s() == 0, "its client has left"
    assert reports(6, has_served, has_served) == [SwitchServed(11.0)]
    assert (unserved_s(), status_of(manager).served_s) == (0.0, 11.0)
    assert reports(7, has_served, has_served) == []


@pytest.mark.parametrize(("source", "served"), [(Role.E, None), (Role.PD, 0)], ids=["not told", "opens none"])
def test_what_cannot_be_verified_is_not(manager: Manager, source: Role, served: int | None) -> None:
    """A release before does not say what it has served."""
    manager.handle(Registered(1, registration(**SWITCHABLE)))
    manager.handle(HeartbeatReceived(1, Heartbeat(1, told(*source.stages))))
    manager.handle(MemberSwitchWanted("a", Role.D, "on purpose"))
    load = InstanceLoad({Stage.DECODE: StageLoad(5, 1, served=served)}, stages_version=1)
    manager.handle(HeartbeatReceived(1, Heartbeat(2, load)))
    manager.now_s += 2.0
    manager.handle(HeartbeatReceived(1, Heartbeat(3, load)))
    assert (status_of(manager).served_s, manager.machine.switches_unserved_s(manager.now_s)) == (None, {"m": 0.0})


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (MemberSwitchWanted("a", Role.P, "on purpose"), SwitchOutcome.OVERTAKEN),
        (HeartbeatReceived(1, Heartbeat(2, told(Stage.DECODE, version=2))), SwitchOutcome.OVERTAKEN),
        (FarewellReceived(1, "enough"), SwitchOutcome.LOST),
        (Registered(2, registration(epoch=2, **SWITCHABLE)), SwitchOutcome.LOST),
        (Registered(2, registration("b", address="a:1")), SwitchOutcome.LOST),
    ],
    ids=["order", "another manager", "farewell", "restart", "address"],
)
def test_an_order_that_is_not_obeyed_ends_too(manager: Manager, event: Any, outcome: SwitchOutcome) -> None:
    switching(manager)
    if isinstance(event, Registered) and event.registration.instance_id == "b":
        manager.handle(SessionEnded(1))
    assert switches_ended(manager.handle(event)) == [SwitchEnded("m", Role.PD, Role.D, outcome, 0.0)]


def test_an_order_ends_when_its_member_is_silent_for_long(manager: Manager) -> None:
    switching(manager)
    manager.now_s += 1.0
    manager.handle(MembersTick())
    found: list[SwitchEnded] = []
    for _ in range(20):
        manager.now_s += LIMITS.tick_s
        found += switches_ended(manager.handle(MembersTick()))
    assert [(switch.outcome, switch.after_s) for switch in found] == [(SwitchOutcome.LOST, 10.0)]
    assert manager.machine.switches_pending_s(manager.now_s) == {}


@pytest.mark.parametrize("switchable", [None, Role.PD])
def test_one_that_cannot_switch_so_far_gets_no_order(manager: Manager, switchable: Role | None) -> None:
    manager.handle(Registered(1, registration(role=Role.PD, switchable=switchable)))
    manager.handle(HeartbeatReceived(1, Heartbeat(1, told(*Role.PD.stages))))
    assert manager.handle(MemberSwitchWanted("a", Role.EPD, "on purpose")) == []
    assert status_of(manager).wanted is None


def test_one_that_starts_again_has_no_order(manager: Manager) -> None:
    manager.handle(Registered(1, registration(**SWITCHABLE)))
    manager.handle(HeartbeatReceived(1, Heartbeat(1, told(*Role.PD.stages))))
    manager.handle(MemberSwitchWanted("a", Role.D, "on purpose"))
    manager.handle(Registered(2, registration(epoch=2, **SWITCHABLE)))
    assert switches(manager.handle(HeartbeatReceived(2, Heartbeat(1, told(*Role.PD.stages))))) == []
    assert status_of(manager).wanted is None


def test_an_old_heartbeat_is_ignored(manager: Manager) -> None:
    manager.joins(1)
    manager.handle(HeartbeatReceived(1, Heartbeat(2, LOAD)))
    assert manager.handle(HeartbeatReceived(1, Heartbeat(1, DRAINING, drained=True))) == []
    assert manager.conditions == {"a": MemberCondition.ACTIVE}


def test_a_watcher_hears_of_its_model_and_kinds_only(manager: Manager) -> None:
    manager.joins(1)
    manager.joins(2, name="b", model="other")
    manager.joins(3, name="r", kind=MemberKind.ROUTER, role=None)
    known = manager.machine.version
    for session in (1, 2, 3):
        manager.handle(FarewellReceived(session, ""))

    def told(**wanted: Any) -> set[str]:
        return {removal.address for removal in manager.machine.since(Watch(7, known, **wanted)).removed}

    assert told() == {"a:1", "b:1", "r:1"}
    assert told(model="m") == {"a:1", "r:1"}
    assert told(model="m", kinds=(MemberKind.INSTANCE,)) == {"a:1"}
    assert told(kinds=(MemberKind.ROUTER,)) == {"r:1"}


def test_a_watcher_of_another_incarnation_or_that_missed_too_much_gets_the_whole_list() -> None:
    manager = Manager(replace(LIMITS, max_departures=2))
    manager.joins(1)
    known = manager.machine.version
    assert not manager.machine.since(Watch(7, known)).full
    assert manager.machine.since(Watch(8, known)).full
    assert manager.machine.since(Watch(7, known + 1)).full
    for session, name in ((2, "b"), (3, "c"), (4, "b")):
        manager.joins(session, name=name)
        manager.handle(FarewellReceived(session, ""))
    delta = manager.machine.since(Watch(7, known))
    assert (delta.full, delta.members) == (True, (member(),))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"suspect_s": 11}, "suspect_s"),
        ({"tick_s": 4}, "tick_s"),
        ({"max_members": 5000}, "max_members"),
        ({"max_departures": 0}, "max_departures"),
    ],
    ids=str,
)
def test_limits_that_do_not_fit_are_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        replace(LIMITS, **changes)


NAMES, SESSIONS = st.sampled_from("abcd"), st.integers(0, 5)


class Watched(RuleBasedStateMachine):
    """A watcher that follows deltas lists what one lists that gets the whole list."""

    @initialize()
    def start(self) -> None:
        self.manager = Manager(replace(LIMITS, max_departures=3))
        self.view = MembershipView(ViewLimits(lost_grace_s=0))
        self.open: set[int] = set()

    @rule(session=SESSIONS, name=NAMES, epoch=st.integers(1, 3), address=NAMES)
    def register(self, session: int, name: str, epoch: int, address: str) -> None:
        self.feed(Registered(session, registration(name, epoch, f"{address}:1")))

    @rule(session=SESSIONS, draining=st.booleans(), drained=st.booleans())
    def beat(self, session: int, *, draining: bool, drained: bool) -> None:
        number = int(self.manager.now_s * 1000)
        self.feed(HeartbeatReceived(session, Heartbeat(number, InstanceLoad({}, draining), drained)))

    @rule(session=SESSIONS)
    def bid_farewell(self, session: int) -> None:
        self.feed(FarewellReceived(session, ""))

    @rule(session=SESSIONS)
    def close(self, session: int) -> None:
        self.feed(SessionEnded(session))

    @rule(name=NAMES)
    def drain(self, name: str) -> None:
        self.feed(DrainWanted(name, ""))

    @rule(seconds=st.sampled_from((0.5, 3.0, 10.0)))
    def wait(self, seconds: float) -> None:
        self.manager.passes(seconds)

    def feed(self, event: Any) -> None:
        before = self.manager.machine.version
        effects = self.manager.handle(event)
        for effect in effects:
            if isinstance(effect, EndSession):
                self.manager.handle(SessionEnded(effect.session))
        assert (MembersChanged(self.manager.machine.version) in effects) == (self.manager.machine.version > before)

    @rule()
    def watch(self) -> None:
        self.view.handle(self.manager.machine.since(Watch(*self.view.known)), self.manager.now_s)
        told = {member.address: member for member in self.view.snapshot.members if not member.suspected}
        assert told == {address: entry for address, entry in self.manager.listed.items() if not entry.suspected}

    @invariant()
    def holds(self) -> None:
        self.manager.machine.validate()


TestWatched = Watched.TestCase
TestWatched.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


FEW, MANY = InstanceLimits(max_batch_items=2), InstanceLimits(max_batch_items=16)


def limited(version: int = 0, limits: InstanceLimits = FEW, **changes: Any) -> InstanceLoad:
    return replace(LOAD, limits=LimitsReport(limits, version, **changes))


def wants(limits: InstanceLimits = MANY, *, by_hand: bool = True) -> MemberLimitsWanted:
    return MemberLimitsWanted("a", limits, by_hand, "a test")


def limits_sent(effects: list[Any]) -> list[tuple[InstanceLimits | None, int, bool]]:
    sent = [effect.order for effect in effects if isinstance(effect, SendOrder)]
    return [(order.limits, order.version, order.by_hand) for order in sent if order.kind is OrderKind.LIMITS]


def beat(session: int, sequence: int, load: InstanceLoad) -> HeartbeatReceived:
    return HeartbeatReceived(session, Heartbeat(sequence, load))


def test_limits_are_ordered_with_a_version_above_all_that_the_member_knows(manager: Manager) -> None:
    manager.joins(1)
    assert manager.handle(wants()) == [], "it has reported nothing yet"
    manager.handle(beat(1, 1, LOAD))
    assert manager.handle(wants()) == [], "its limits cannot change"
    manager.handle(beat(1, 2, limited(version=4)))
    assert limits_sent(manager.handle(wants())) == [(MANY, 5, True)]
    assert limits_sent(manager.handle(wants(FEW, by_hand=False))) == [(FEW, 6, False)]
    assert manager.handle(MemberLimitsWanted("b", MANY, by_hand=True, reason="a test")) == []


def test_limits_are_ordered_again_on_a_new_stream_until_the_member_has_them(manager: Manager) -> None:
    manager.joins(1)
    manager.handle(beat(1, 1, limited()))
    manager.handle(wants())
    assert limits_sent(manager.handle(beat(1, 2, limited()))) == [], "it is on its way"
    manager.handle(SessionEnded(1))
    manager.joins(2)
    assert limits_sent(manager.handle(beat(2, 1, limited()))) == [(MANY, 2, True)]
    assert "has limits: max_batch_items 16" in str(manager.handle(beat(2, 2, limited(2, MANY))))
    assert manager.handle(beat(2, 3, limited(2, MANY))) == [], "it is said once"
    manager.handle(SessionEnded(2))
    manager.joins(3)
    assert limits_sent(manager.handle(beat(3, 1, limited(2, MANY)))) == []


def test_limits_that_a_member_refuses_are_not_ordered_again(manager: Manager) -> None:
    manager.joins(1)
    manager.handle(beat(1, 1, limited()))
    manager.handle(wants())
    assert "refuses limits (max_batch_items 16): too many" in str(
        manager.handle(beat(1, 2, limited(1, fault="too many")))
    )
    manager.handle(SessionEnded(1))
    manager.joins(2)
    assert limits_sent(manager.handle(beat(2, 1, limited(1, fault="too many")))) == []


def test_another_process_with_the_id_of_a_member_gets_its_limits_from_the_first_report_on(manager: Manager) -> None:
    manager.joins(1)
    manager.handle(beat(1, 1, limited()))
    manager.handle(wants())
    manager.joins(2, epoch=2)
    assert limits_sent(manager.handle(beat(2, 1, limited()))) == [(MANY, 1, True)]
    manager.passes(11)
    assert manager.listed == {}
    manager.joins(3, epoch=3)
    assert limits_sent(manager.handle(beat(3, 1, limited()))) == [(MANY, 1, True)], "also after silence, if set by hand"
    manager.handle(FarewellReceived(3, "it ends"))
    manager.joins(4, epoch=4)
    assert limits_sent(manager.handle(beat(4, 1, limited()))) == [], "it had ended in order"


def test_limits_that_another_manager_has_ordered_since_stay(manager: Manager) -> None:
    manager.joins(1)
    manager.handle(beat(1, 1, limited()))
    manager.handle(wants())
    manager.handle(beat(1, 2, limited(7, FEW)))
    manager.handle(SessionEnded(1))
    manager.joins(2)
    assert limits_sent(manager.handle(beat(2, 1, limited(7, FEW)))) == []
