from collections.abc import Mapping
from dataclasses import replace

import pytest

from triptych.domain.decision import Bounds, PoolFacts, PoolLoad, PoolView
from triptych.domain.instance import ClosedStage, InstanceLoad, StageLoad
from triptych.domain.membership import MemberKind
from triptych.domain.pool import MemberCondition, MemberStatus, Registration
from triptych.domain.stage import Role, Stage
from triptych.machine.pool_manager.stage_views import stage_views, switched
from triptych.policy.switching import StageView

ENCODE, PREFILL, DECODE = Stage.ENCODE, Stage.PREFILL, Stage.DECODE
LOAD = PoolLoad(burst_per_s=30.0, short_per_s=20.0, long_per_s=50.0, peak_per_s=60.0, waiting=500.0, coverage=1.0)
FACTS = PoolFacts(100.0, 2.0, 12, busy_per_s=100.0)
KNOWN = PoolView("m/E", 2, Bounds(), load=LOAD, report_age_s=1.0, facts=FACTS)
POOLS = {Role.E: KNOWN, Role.P: KNOWN, Role.D: KNOWN}


def member(
    name: str, role: Role, stages: Mapping[Stage, StageLoad] | None = None, *, switchable: Role | None = Role.EPD
) -> MemberStatus:
    told = Registration(MemberKind.INSTANCE, name, 1, f"{name}:1", "m", role=role, switchable=switchable)
    load = InstanceLoad({stage: StageLoad(0, 0) for stage in role.stages} if stages is None else stages)
    return MemberStatus(told, MemberCondition.ACTIVE, False, load, 9.0, 0.1)


def test_a_stage_holds_what_its_instances_hold_or_what_routers_say_that_waits() -> None:
    encoder = member("e", Role.E, {ENCODE: StageLoad(pending_tokens=600, pending=3)})
    (view,) = stage_views([encoder], {Role.E: KNOWN})
    assert (view.stage, view.instances, view.held, view.holds) == (ENCODE, 1, 6.0, 2.0)
    assert (view.arriving, view.served) == (0.3, 1.0)
    (view,) = stage_views([encoder], {Role.E: replace(KNOWN, load=replace(LOAD, burst_per_s=29.0))})
    assert view.arriving == 0.2, "5 s with a little more are chance"
    assert [(instance.instance_id, instance.held) for instance in view.movable] == [("e", 6.0)]
    (view,) = stage_views([member("p", Role.P)], {Role.P: KNOWN})
    assert view.held == 5.0


def test_a_tight_objective_does_not_make_little_work_look_like_a_long_queue() -> None:
    """The objectives leave an instance idle for nearly all of the time."""
    encoder = member("e", Role.E, {ENCODE: StageLoad(pending_tokens=600, pending=3)})

    def viewed(capacity_per_s: float) -> StageView:
        facts = replace(FACTS, capacity_per_s=capacity_per_s, busy_per_s=400.0)
        (view,) = stage_views([encoder], {Role.E: replace(KNOWN, facts=facts)})
        return view

    view = viewed(300.0)
    assert (view.held, view.arriving, view.served) == (2.0, 0.1, 1.0)
    view = viewed(12.0)
    assert (view.held, view.arriving, view.served) == (3.0, 0.15, 1.0)
    assert view.pressure(5.0, 1) < 1, "as little arrives, it does not grow"


def test_the_decode_stage_holds_running_answers() -> None:
    several = [member(name, Role.D, {DECODE: StageLoad(900, 7)}) for name in ("a", "b")]
    (view,) = stage_views(several, {Role.D: KNOWN})
    assert (view.instances, view.held, view.holds, view.arriving, view.served) == (2, 14.0, 12.0, 0.0, 0.0)


def test_an_instance_counts_for_the_stages_that_it_serves_now() -> None:
    members = [member("e", Role.E, {DECODE: StageLoad(0, 0)}), member("t", Role.PD), member("x", Role.E)]
    views = {view.stage: view for view in stage_views(members, POOLS)}
    assert {stage: view.instances for stage, view in views.items()} == {ENCODE: 1, PREFILL: 1, DECODE: 2}
    assert [instance.instance_id for instance in views[DECODE].movable] == ["e"], "t would leave two stages"
    assert switched(Role.E, members) == -1
    assert switched(Role.D, members) == 1
    assert switched(Role.PD, members) == 0


@pytest.mark.parametrize(
    "gone",
    [
        replace(member("x", Role.E), condition=MemberCondition.LEAVING),
        replace(member("x", Role.E), suspected=True),
    ],
)
def test_one_that_leaves_or_is_silent_does_not_count(gone: MemberStatus) -> None:
    (view,) = stage_views([member("e", Role.E), gone], {Role.E: KNOWN})
    assert view.instances == 1


def test_one_that_cannot_switch_is_not_moved() -> None:
    (view,) = stage_views([member("x", Role.E, switchable=None)], {Role.E: KNOWN})
    assert (view.instances, view.movable) == (1, ())


def test_one_that_is_about_to_leave_a_stage_does_not_count_for_it() -> None:
    """Else the last one that stays could be moved as well."""
    leaving = replace(member("x", Role.E, {ENCODE: StageLoad(800, 2)}), wanted=Role.D, wanted_s=0.5)
    (view,) = stage_views([leaving, member("e", Role.E)], {Role.E: KNOWN})
    assert (view.instances, view.held) == (1, 8.0)
    assert [instance.instance_id for instance in view.movable] == ["e"]


@pytest.mark.parametrize(
    "unknown",
    [
        replace(KNOWN, facts=replace(FACTS, capacity_per_s=None)),
        replace(KNOWN, facts=replace(FACTS, busy_per_s=None)),
        replace(KNOWN, facts=replace(FACTS, wait_objective_s=None)),
        replace(KNOWN, facts=replace(FACTS, wait_objective_s=0.0)),
        replace(KNOWN, load=None),
        replace(KNOWN, report_age_s=None),
        replace(KNOWN, report_age_s=6.0),
    ],
)
def test_a_stage_of_which_little_is_known_is_left_out(unknown: PoolView) -> None:
    members = [member("e", Role.E), member("d", Role.D)]
    assert [view.stage for view in stage_views(members, {Role.E: unknown, Role.D: KNOWN})] == [DECODE]
    assert stage_views(members, {Role.D: replace(KNOWN, facts=replace(FACTS, batch=None))}) == []
    assert stage_views(members, {}) == []


def test_what_an_instance_could_not_open_it_cannot_serve_and_loads_take_time() -> None:
    instance = member("e", Role.E)
    closed = (ClosedStage(PREFILL, 4.0), ClosedStage(DECODE, 4.0, "no memory"))
    (view,) = stage_views([replace(instance, load=replace(instance.load, closed=closed))], {Role.E: KNOWN})
    (movable,) = view.movable
    assert movable.stages == {ENCODE, PREFILL}
    assert movable.opens_s[PREFILL] == 4.0
