"""Plans that a pool manager follows: their files, and the searches for better ones."""

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.unit.cli.plan.plans import placement, plan_of, written
from triptych.domain.decision import Bounds
from triptych.domain.instance import InstanceLoad, StageLoad
from triptych.domain.membership import MemberKind
from triptych.domain.mix import Form, Mix
from triptych.domain.pool import MemberCondition, MemberStatus, Registration
from triptych.domain.replanning import PlanOutcome, PlanQuestion, Proposal, RoleCount
from triptych.domain.scaling import Kind, PoolName
from triptych.domain.stage import Role
from triptych.domain.windows import ClassWindow, NamedClass, WindowReport
from triptych.errors import TriptychError, Unavailable
from triptych.machine.pool_manager.plan import ReplanLimits
from triptych.machine.pool_manager.reports import RouterReports
from triptych.policy.moving import PoolSize
from triptych.runtime.metrics import Metrics
from triptych.runtime.plans import BadPlan, Budget, PlacedPool, PlanRecord
from triptych.runtime.process import CannotStart
from triptych.runtime.tasks import TaskScope
from triptych.services.pool_manager import gauges
from triptych.services.pool_manager.app import app
from triptych.services.pool_manager.build import build
from triptych.services.pool_manager.plan import FollowedPlan
from triptych.services.pool_manager.replanner import ChildReplanner
from triptych.services.pool_manager.replanning import Replanning
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.virtual import virtual_time
from triptych.virtual.world import virtual_world

TEXT = (Form("text", 300, 300, prompt_tokens=60_000, output_tokens=15_000),)
IMAGES = (Form("image", 4, 4, 8, 4_000_000, 8, 0.0, 5600, 200),)


def a_plan(**more: Any) -> PlanRecord:
    placed = placement({"E": 3, "PD": 2}, "l4")
    return replace(plan_of(placed, budget=Budget({"l4": 8}, None, 2.0)), mix=TEXT, **more)


def test_a_plan_says_the_sizes_of_pools_and_its_mix(tmp_path: Path) -> None:
    plan = FollowedPlan.read(written(tmp_path, a_plan()))
    assert (plan.model, plan.rate, plan.mix, plan.most) == ("triptych-demo", 2.0, Mix(TEXT), {"": 8})
    encoders, texts = (PoolName("triptych-demo", role) for role in (Role.E, Role.PD))
    assert plan.bounds_of(encoders, replans=False) == Bounds(2, 6)
    assert plan.bounds_of(texts, replans=False) == Bounds(1, 5)
    assert plan.bounds_of(texts, replans=True) == Bounds(1, 8)
    assert plan.bounds_of(PoolName("another", Role.E), replans=True) is None
    assert plan.bounds_of(PoolName("triptych-demo", Role.D), replans=False) is None


def test_without_a_number_of_devices_pools_may_double(tmp_path: Path) -> None:
    plan = FollowedPlan.read(written(tmp_path, a_plan(budget=Budget({"l4": None}, None, 2.0))))
    assert plan.most == {"": 10}
    assert plan.bounds[Kind(Role.E)] == Bounds(2, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something"}, "format: Input should be 'triptych-plan'"),
        ({"version": 2}, "version: Input should be 1"),
        ({"mix": None}, "does not say for which mix"),
        ({"candidates": [], "winners": {}, "front": []}, "no candidate of the plan meets the objectives"),
        ({"budget": {"devices": {}}}, "budget.usd_per_hour: Field required"),
        ({"model_id": 3}, "model_id: Input should be a valid string"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, a_plan())
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadPlan) as refused:
        FollowedPlan.read(path)
    assert message in str(refused.value)


def test_other_files_are_refused_too(tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match=r"does not exist|cannot be read|No such file"):
        FollowedPlan.read(tmp_path / "absent.json")
    (tmp_path / "text").write_text("not JSON")
    with pytest.raises(BadPlan, match="Invalid JSON"):
        FollowedPlan.read(tmp_path / "text")


def test_each_tier_of_a_plan_is_a_pool_with_bounds_of_its_own(tmp_path: Path) -> None:
    placed = placement(
        {"E": 2, "PD": 1},
        devices={"E": "l4", "PD": "h100"},
        degrees={Role.E: 1, Role.PD: 2},
        more=(PlacedPool(Role.PD, 3, "l4", 1),),
    )
    budget = Budget({"l4": 8, "h100": 6}, None, 2.0)
    plan = FollowedPlan.read(written(tmp_path, replace(plan_of(placed, budget=budget), mix=TEXT)))
    assert plan.most == {"l4": 8, "2xh100": 3}

    def bounds(role: Role, tier: str, *, replans: bool) -> Bounds | None:
        return plan.bounds_of(PoolName("triptych-demo", role, tier), replans=replans)

    assert bounds(Role.PD, "2xh100", replans=False) == Bounds(1, 3)
    assert bounds(Role.PD, "l4", replans=False) == Bounds(2, 6)
    assert bounds(Role.PD, "2xh100", replans=True) == Bounds(0, 3)
    for tier in ("", "l4"):  # where a role has one kind of devices, its pool may be without a tier
        assert bounds(Role.E, tier, replans=False) == Bounds(1, 5)
        assert bounds(Role.E, tier, replans=True) == Bounds(1, 8)
    for replans in (False, True):
        assert bounds(Role.PD, "a100", replans=replans) is None
        assert bounds(Role.PD, "", replans=replans) is None, "of which tier is not known"


def test_replan_needs_a_plan() -> None:
    with pytest.raises(ValueError, match="replan needs a plan"):
        PoolManagerSettings(replan=True)


# --- following --------------------------------------------------------------------------------------------------------


class Scripted:
    """``ports.Replanner`` with one answer."""

    def __init__(self, answer: Proposal | Exception, takes_s: float = 5.0) -> None:
        self.answer = answer
        self.takes_s = takes_s
        self.asked: list[PlanQuestion] = []

    async def search(self, question: PlanQuestion) -> Proposal:
        self.asked.append(question)
        await asyncio.sleep(self.takes_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def member(name: str, role: Role) -> MemberStatus:
    told = Registration(MemberKind.INSTANCE, name, 1, "127.0.0.1:1", "triptych-demo", role=role, switchable=Role.EPD)
    load = InstanceLoad({stage: StageLoad(0, 0) for stage in role.stages})
    return MemberStatus(told, MemberCondition.ACTIVE, False, load, 0.0, 0.0)


class Site:
    """A plan that is followed, with reports of images."""

    def __init__(self, path: Path, replanner: Scripted, **more: Any) -> None:
        self.clock = asyncio.get_running_loop().time
        self.switched: list[tuple[str, Role]] = []
        self.scope = TaskScope("site")
        self.reports = RouterReports()
        limits = ReplanLimits(replan_search_s=20.0)
        self.replanning = Replanning(
            FollowedPlan.read(path),
            limits,
            replans=more.get("replans", True),
            replanner=replanner,
            switch=lambda name, role, _: self.switched.append((name, role)),
            clock=self.clock,
            scope=self.scope,
        )
        self.sequence = 0
        self.per_s = 4

    async def run(self, seconds: int, members: Sequence[MemberStatus]) -> None:
        pools = {
            PoolName("triptych-demo", Role.E): PoolSize(1, 1, 8),
            PoolName("triptych-demo", Role.PD): PoolSize(2, 1, 8),
        }
        for _ in range(seconds):
            await asyncio.sleep(1)
            self.sequence += 1
            classes = (NamedClass("image-1024", ClassWindow(arrivals=self.per_s, items=self.per_s)),)
            report = WindowReport(1, self.sequence, 1.0, 0.0, "triptych-demo", classes, forms=IMAGES)
            self.reports.accept("router", report, self.clock())
            self.replanning.tick(members, pools, self.reports)
            self.replanning.validate()


MEMBERS = [member("e1", Role.E), member("t1", Role.PD), member("t2", Role.PD)]
BETTER = Proposal((RoleCount(Role.E, 2), RoleCount(Role.PD, 1)), 0.3, "more encoders")


def followed(tmp_path: Path, replanner: Scripted, seconds: int = 90, **more: Any) -> Site:
    async def main() -> Site:
        site = Site(written(tmp_path, a_plan()), replanner, **more)
        await site.run(seconds, MEMBERS)
        await site.scope.close()
        return site

    return virtual_time.run(main(), limit_s=1000)


def test_a_mix_that_routers_report_leads_to_a_move(tmp_path: Path) -> None:
    replanner = Scripted(BETTER)
    site = followed(tmp_path, replanner)
    [question] = replanner.asked
    assert question.present == (RoleCount(Role.E, 1), RoleCount(Role.PD, 2))
    assert question.rate == pytest.approx(4.0, rel=0.15)
    assert question.mix.forms[0].kind == "image"
    assert site.switched
    assert {role for _, role in site.switched} == {Role.E}
    planned = site.replanning.size(PoolName("triptych-demo", Role.PD))
    assert planned is not None
    assert planned.size == 2
    assert "E:1,PD:2 becomes E:2,PD:1" in planned.reason
    assert site.replanning.size(PoolName("another", Role.PD)) is None


def test_a_rate_that_falls_is_believed_when_it_has_fallen_for_long(tmp_path: Path) -> None:
    replanner = Scripted(replace(BETTER, wanted=(RoleCount(Role.E, 1), RoleCount(Role.PD, 2)), gain=0.0))

    async def main() -> None:
        site = Site(written(tmp_path, a_plan()), replanner)
        await site.run(100, MEMBERS)
        site.per_s = 1
        await site.run(200, MEMBERS)
        await site.scope.close()

    virtual_time.run(main(), limit_s=1000)
    assert [question.rate for question in replanner.asked] == [pytest.approx(4.0, rel=0.1), pytest.approx(2.5, rel=0.3)]


def test_without_replan_it_is_said_only(tmp_path: Path) -> None:
    site = followed(tmp_path, Scripted(BETTER), replans=False)
    assert not site.switched
    assert site.replanning.size(PoolName("triptych-demo", Role.PD)) is None
    [decision] = site.replanning.status().decisions
    assert decision.outcome is PlanOutcome.ADVISED
    assert site.replanning.gain == 0.3
    assert site.replanning.outcomes[PlanOutcome.ADVISED] == 1


@pytest.mark.parametrize(
    ("answer", "takes_s", "reason"),
    [
        (Unavailable("no memory"), 1.0, "no memory"),
        (BETTER, 60.0, "has not ended within 20 s"),
        (RuntimeError("a defect"), 1.0, "the search has a defect"),
    ],
)
def test_a_search_that_fails_changes_nothing_and_is_said(
    tmp_path: Path, answer: Proposal | TriptychError, takes_s: float, reason: str
) -> None:
    site = followed(tmp_path, Scripted(answer, takes_s))
    assert not site.switched
    [decision] = site.replanning.status().decisions
    assert decision.outcome is PlanOutcome.FAILED
    assert reason in decision.reason


@pytest.mark.slow
async def test_a_search_in_a_process_of_its_own_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    question = PlanQuestion((), Mix(TEXT), 1.0, frozenset({Kind(Role.PD)}), {"": 2}, True, 0.1)
    with pytest.raises(Unavailable, match=r"the search ended with status 2: .*plan.json"):
        await ChildReplanner(path).search(question)


@pytest.mark.slow
def test_a_search_that_ends_before_it_is_asked_says_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    question = PlanQuestion((), Mix(TEXT), 1.0, frozenset({Kind(Role.PD)}), {"": 2}, True, 0.1)

    async def keep_the_loop_busy() -> None:
        while True:
            time.sleep(0.02)  # noqa: ASYNC251 - as a manager on a busy machine
            await asyncio.sleep(0)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            busy = group.create_task(keep_the_loop_busy())
            for _ in range(5):
                with pytest.raises(Unavailable, match="the search ended with status 1"):
                    await ChildReplanner(tmp_path / "plan.json").search(question)
            busy.cancel()

    uvloop.run(main())


async def test_a_manager_does_not_start_with_a_plan_that_cannot_be_followed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(CannotStart, match=r"plan .*plan\.json: model: Field required"):
        async with app(PoolManagerSettings(port=0, plan=path)):
            pass


def test_tiers_that_the_plan_does_not_tell_apart_are_not_moved(tmp_path: Path) -> None:
    async def main() -> str:
        site = Site(written(tmp_path, a_plan()), Scripted(BETTER))
        pools = {PoolName("triptych-demo", Role.PD, tier): PoolSize(1, 1, 8) for tier in ("fast", "slow")}
        site.replanning.tick(MEMBERS, pools, site.reports)
        await site.scope.close()
        return site.replanning.status().state

    assert virtual_time.run(main(), limit_s=100) == "paused: a role has more tiers than in the plan"


def test_metrics_say_the_drift_and_what_came_of_it(tmp_path: Path) -> None:
    async def main() -> str:
        metrics = Metrics()
        world = virtual_world("m", 1, scope=TaskScope("manager"))
        settings = PoolManagerSettings(plan=written(tmp_path, a_plan()), replan=True)
        service = build(settings, world, hour=lambda: 0.0, replanner=Scripted(BETTER))
        gauges.watch(metrics, service)
        text = metrics.render().decode()
        await world.scope.close()
        return text

    text = virtual_time.run(main(), limit_s=100)
    assert 'triptych_pool_plan_decisions_total{model_name="triptych-demo",outcome="moved"} 0.0' in text
    assert 'triptych_pool_plan_gain{model_name="triptych-demo"} 0.0' in text
