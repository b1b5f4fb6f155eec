"""``triptych plan again``: the answer to a pool manager that follows a plan."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from tests.command_line import invoke
from tests.unit.cli.plan.plans import config, placement, plan_of, written
from triptych.domain.mix import Form, Mix
from triptych.domain.replanning import PlanQuestion, Proposal, RoleCount, by_kind
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role
from triptych.runtime.plans import Budget
from triptych.workload.report import Objectives

QUESTION = PlanQuestion(
    (RoleCount(Role.EPD, 1),),
    Mix.of([Form("image", 100, 100, 600, 600 * 336 * 336, 600, 0.0, 200 * 1900, 100 * 60)]),
    3.0,
    frozenset(Kind(role) for role in Role),
    {"": 4},
    True,
    0.1,
)


@pytest.fixture(autouse=True)
def niceness(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the command would have lowered its priority by."""
    asked: list[int] = []
    monkeypatch.setattr(os, "nice", asked.append)
    return asked


def answered(plan: Path, question: str, status: int = 0) -> str:
    result = invoke(["plan", "again", str(plan)], input=question)
    assert result.exit_code == status, result.output
    return result.output


def asked(question: PlanQuestion) -> str:
    return TypeAdapter(PlanQuestion).dump_json(question).decode()


@pytest.mark.slow
def test_a_plan_is_made_again_with_its_own_model_settings_and_devices(tmp_path: Path, niceness: list[int]) -> None:
    placed = placement({"EPD": 1}, "a100-80", settings={"max-sequences": "32", "max-batch-items": "8"})
    made = plan_of(
        placed,
        model=str(config(tmp_path)),
        common={"control-ms": "0.3"},
        objectives=Objectives(1.5, 0.1),
        budget=Budget({"a100-80": 4}, None, 3.0),
    )
    said = json.loads(answered(written(tmp_path, made), asked(QUESTION)))
    found = TypeAdapter(Proposal).validate_python(said)
    assert 1 <= sum(by_kind(found.wanted).values()) <= 4
    assert found.reason
    assert niceness == [19]


def test_a_question_that_is_none_is_refused(tmp_path: Path) -> None:
    plan = written(tmp_path, plan_of(placement({"EPD": 1}, "a100-80")))
    assert "no question of a pool manager" in answered(plan, "what now?", 2)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    assert "plan.json" in answered(path, asked(QUESTION), 2)


@pytest.mark.slow
def test_a_mix_that_the_model_cannot_serve_is_said(tmp_path: Path) -> None:
    made = plan_of(
        placement({"EPD": 1}, "a100-80", settings={"max-sequences": "32"}), model=str(config(tmp_path)), common={}
    )
    question = replace(QUESTION, mix=Mix.of([Form("text", 10, 10, prompt_tokens=10**7, output_tokens=100)]))
    assert "the mix cannot be served" in answered(written(tmp_path, made), asked(question), 1)
