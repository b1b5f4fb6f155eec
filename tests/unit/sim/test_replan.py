"""A simulated cluster whose pool manager follows a plan: the real services move while requests run."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.plan.plans import placement, plan_of, written
from tests.unit.planning.kit import demand
from tests.unit.sim.kit import MIX, deployment, plan
from triptych.domain.replanning import PlanQuestion, Proposal, RoleCount, in_letters
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role
from triptych.machine.pool_manager.plan import ReplanLimits
from triptych.runtime.plans import Budget
from triptych.services.text.settings import TextSettings
from triptych.sim.run import simulate
from triptych.sim.scenario import Deployment
from triptych.testing.fakes import FAKE_MODEL
from triptych.workload.requests import Distribution, Plan

pytestmark = pytest.mark.slow
TEXT = replace(MIX, images=Distribution.parse("0"))
IMAGES = replace(MIX, images=Distribution.parse("2"))
PHASE_S, RATE = 70.0, 3.0


class Scripted:
    """``ports.Replanner`` whose answers come one after the other."""

    def __init__(self, *answers: dict[Role, int]) -> None:
        self.answers = list(answers)
        self.asked: list[PlanQuestion] = []

    async def search(self, question: PlanQuestion) -> Proposal:
        self.asked.append(question)
        await asyncio.sleep(3.0)
        wanted = tuple(RoleCount(role, count) for role, count in self.answers.pop(0).items())
        return Proposal(wanted, 0.5, "it is better")


def load() -> Plan:
    """Text, then images, then text again."""
    requests = [
        replace(planned, arrival_s=planned.arrival_s + number * PHASE_S)
        for number, mix in enumerate((TEXT, IMAGES, TEXT))
        for planned in plan(RATE, int(RATE * PHASE_S), mix=mix).requests
    ]
    return Plan(requests, 3 * PHASE_S)


def following(folder: Path, replanner: Scripted, begins: dict[str, int]) -> Deployment:
    planned = plan_of(placement(begins, "device"), budget=Budget({"device": 6}, None, RATE))
    path = written(folder, replace(planned, model_id=FAKE_MODEL.model_id, mix=demand(TEXT).mix.forms))
    limits = ReplanLimits(drift_persists_s=10.0, drift_requests=30, replan_rest_s=20.0)
    manager = {"autoscale": True, "scaler": "127.0.0.1:1", "plan": path, "replan": True, "replanning": limits}
    sizes = {Role(letters): count for letters, count in begins.items()}
    text: dict[str, Any] = {"model": Path("model"), "switchable": Role.EPD, "engine": {"kv_cache_bytes": 1 << 34}}
    made = deployment(
        sizes, manager=manager, router={"slo": ("ttft=2s", "tbt=100ms")}, scales=True, replanner=replanner
    )
    whole = deployment({Role.EPD: 1}).kinds[Kind(Role.EPD)]
    texts = {pool: TextSettings(role=pool.role, **text) for pool in made.sizes}
    return replace(made, kinds=dict.fromkeys(made.sizes, whole), texts=texts)


def test_a_cluster_moves_with_the_mix_and_back_and_no_request_fails(tmp_path: Path) -> None:
    replanner = Scripted({Role.E: 2, Role.PD: 2}, {Role.EPD: 2})
    outcome = simulate(following(tmp_path, replanner, {"EPD": 2}), load())
    assert all(record.ok for record in outcome.records)
    assert [in_letters(question.present) for question in replanner.asked] == ["EPD:2", "E:2,PD:2"]
    assert [question.mix.forms[0].kind for question in replanner.asked] == ["image", "text"]
    story = json.dumps([decision.text for decision in outcome.decisions])
    assert "hybrid-1 switches to role" in story, story
    assert "hybrid-2 switches to role" in story, story
    assert story.count("start hybrid-") == 2, story
    assert story.count("stop hybrid-") == 2, story
    ends = [use.end_s for use in outcome.instances]
    assert sum(end_s > 3 * PHASE_S - 10 for end_s in ends) == 2, "as many are left as there were"


def test_instances_that_are_enough_in_other_roles_switch_and_none_is_started(tmp_path: Path) -> None:
    replanner = Scripted({Role.E: 2, Role.P: 1, Role.D: 1}, {Role.E: 1, Role.P: 1, Role.D: 2})
    outcome = simulate(following(tmp_path, replanner, {"E": 1, "P": 1, "D": 2}), load())
    assert all(record.ok for record in outcome.records)
    story = [decision.text for decision in outcome.decisions]
    assert len(story) == 2, story
    assert "switches to role E: plan 1: E:1,P:1,D:2 becomes E:2,P:1,D:1" in story[0]
    assert "switches to role D: plan 2: E:2,P:1,D:1 becomes E:1,P:1,D:2" in story[1]
