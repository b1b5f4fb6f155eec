"""Decisions on sizes and roles, as ``triptych up`` tells them."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from triptych.cli import decisions
from triptych.cli.decisions import Changes
from triptych.domain.decision import (
    Acting,
    Bounds,
    DecisionOutcome,
    DecisionSummary,
    PoolState,
    Reason,
    ScalingStatus,
    Why,
)
from triptych.domain.instance import InstanceLoad, StageLoad
from triptych.domain.membership import MemberKind
from triptych.domain.pool import ManagerStatus, MemberCondition, MemberStatus, PoolStatus, Registration
from triptych.domain.replanning import PlanDecision, PlanOutcome, PlanStatus, RoleCount
from triptych.domain.stage import Role
from triptych.domain.windows import Judged
from triptych.errors import Unavailable
from triptych.rpc.server import RpcServer
from triptych.runtime.tasks import TaskScope
from triptych.services.pool_manager.servicer import SERVICE_NAME, PoolManagerServicer

GROWTH = DecisionSummary(
    number=3,
    age_s=1.0,
    wanted=1,
    target=2,
    reasons=(Reason(Why.BREACH, "90 % within the SLO"), Reason(Why.BOUNDS, "at most 2")),
    drain="",
    sick="",
    missing=(),
    ready=1,
    starting=0,
    draining=0,
    load=None,
    capacity_per_s=None,
    needed=None,
    attainment=Judged(9, 1),
    report_age_s=0.5,
    outcome=DecisionOutcome.PENDING,
    detail="",
)


def status(*made: DecisionSummary, incarnation: int = 1) -> ManagerStatus:
    scaling = ScalingStatus(
        "m/E", PoolState.GROWING, Acting.ALL, 2, 1, 0, 0, Bounds(1, 8), Judged(9, 1), None, "", made
    )
    return ManagerStatus(incarnation, 1, 9.0, 0, (PoolStatus("m", Role.E, (), scaling), PoolStatus("m", None, ())))


def test_a_change_is_told_once_with_its_reasons() -> None:
    changes = Changes()
    assert changes.news(status(GROWTH)) == ["pool m/E: 1 -> 2 instances: 90 % within the SLO; at most 2"]
    assert changes.news(status(GROWTH)) == []
    assert changes.news(status(replace(GROWTH, outcome=DecisionOutcome.DONE))) == []
    shrink = replace(GROWTH, number=4, wanted=2, target=1, reasons=(Reason(Why.LOW_LOAD, "0.1/s"),), drain="encoder-1")
    assert changes.news(status(GROWTH, shrink)) == ["pool m/E: 2 -> 1 instances, encoder-1 drains: 0.1/s"]


def test_what_changes_nothing_or_is_only_advised_is_not_told() -> None:
    changes = Changes()
    assert changes.news(status(replace(GROWTH, target=1))) == []
    assert changes.news(status(replace(GROWTH, outcome=DecisionOutcome.ADVISED))) == []


def test_what_becomes_of_a_plan_is_told_as_it_changes() -> None:
    present, wanted = (RoleCount(Role.EPD, 2),), (RoleCount(Role.E, 3),)
    moving = PlanDecision(1, 3.0, present, wanted, 0.4, "95% within", PlanOutcome.MOVING)

    def status_of(decision: PlanDecision) -> ManagerStatus:
        return replace(status(), plan=PlanStatus("m", True, present, (), "moving", (decision,)))

    changes = Changes()
    assert changes.news(status_of(moving)) == ["plan 1, moving: EPD:2 -> E:3: 95% within"]
    assert changes.news(status_of(moving)) == []
    assert changes.news(status_of(replace(moving, outcome=PlanOutcome.MOVED))) == [
        "plan 1, moved: EPD:2 -> E:3: 95% within"
    ]


def test_a_change_that_fails_is_told_once() -> None:
    changes = Changes()
    changes.news(status(GROWTH))
    failed = replace(GROWTH, outcome=DecisionOutcome.FAILED, detail="encoder-2 crashed")
    assert changes.news(status(failed)) == ["pool m/E: 2 instances are not reached: encoder-2 crashed"]
    assert changes.news(status(failed)) == []


def test_another_manager_counts_from_the_start() -> None:
    changes = Changes()
    changes.news(status(GROWTH))
    assert len(changes.news(status(replace(GROWTH, number=1), incarnation=2))) == 1


def encoder(serves: Role, wanted: Role | None = None) -> ManagerStatus:
    told = Registration(MemberKind.INSTANCE, "encoder-1", 1, "127.0.0.1:1", "m", role=Role.E, switchable=Role.EPD)
    load = InstanceLoad(dict.fromkeys(serves.stages, StageLoad(0, 0)))
    member = MemberStatus(told, MemberCondition.ACTIVE, False, load, 1.0, 0.1, wanted)
    return ManagerStatus(1, 1, 9.0, 0, (PoolStatus("m", Role.E, (member,)),))


def test_a_switch_is_told_when_it_is_complete() -> None:
    changes = Changes()
    assert changes.news(encoder(Role.E)) == []
    assert changes.news(encoder(Role.E, wanted=Role.D)) == changes.news(encoder(Role.ED, wanted=Role.D)) == []
    assert changes.news(encoder(Role.D, wanted=Role.D)) == ["encoder-1 serves role D now"]
    assert changes.news(encoder(Role.D, wanted=Role.D)) == []
    assert changes.news(encoder(Role.E)) == ["encoder-1 serves role E now"], "it was started again"


class Scripted:
    """A pool manager of which only the status is asked."""

    def __init__(self, *answers: ManagerStatus | Exception) -> None:
        self._answers = iter(answers)
        self.all_given = asyncio.Event()

    async def status(self) -> ManagerStatus:
        answer = next(self._answers, None)
        if answer is None:
            self.all_given.set()
            return status()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_changes_are_followed_over_the_absence_of_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_POLL_S", 0.01)
    later = replace(GROWTH, number=4, wanted=2, target=3)
    manager: Any = Scripted(status(GROWTH), Unavailable("it is shutting down"), status(GROWTH, later))
    told: list[str] = []
    register = PoolManagerServicer(manager).register
    async with (
        RpcServer(host="127.0.0.1", port=0, service_names=(SERVICE_NAME,), register=register) as server,
        TaskScope("test") as scope,
    ):
        scope.spawn(decisions.follow(f"127.0.0.1:{server.port}", told.append), name="follow")
        async with asyncio.timeout(60):
            await manager.all_given.wait()
    assert [line.split(":")[1].strip() for line in told] == ["1 -> 2 instances", "2 -> 3 instances"]
