"""Modes of the best placements: tried where they can help, by simulations of services, and what else is said of them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.planning.kit import OBJECTIVES, ROUNDS, Factory, conclude, question, workload
from tests.unit.sim.kit import deployment
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role
from triptych.planning.modes import MODES, try_modes
from triptych.planning.planner import Findings, Question, search
from triptych.runtime.plans import Placement, PlanRecord
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.text.settings import TextSettings
from triptych.sim.scenario import Deployment
from triptych.workload.report import Objectives

pytestmark = pytest.mark.slow


def test_pools_that_follow_their_load_share_the_budgets_devices() -> None:
    placement = Placement({Role.E: 1, Role.PD: 1}, {Role.E: "l4", Role.PD: "l4"}, {Role.E: 1, Role.PD: 1}, 1)
    scaling = next(mode for mode in MODES if mode.name == "autoscaling")
    scaled = scaling.applied(placement, question({"l4": 4}, rate=1.0))
    assert scaled.settings["pool-sizes"] == "E=1-2,PD=1-2"
    assert scaled.plain == placement


ONE_ROUND = (replace(ROUNDS[0], keeps=0),)


class Services(Factory):
    """Deployments in the modes that placements have."""

    def deployment(self, placement: Placement) -> Deployment:
        made = super().deployment(replace(placement, settings={}))
        sizes = placement.settings.get("pool-sizes", "")
        settings: dict[str, Any] = {
            "autoscale": placement.autoscale,
            "switch_roles": placement.switch_roles,
            "scaler": "127.0.0.1:1" if placement.autoscale else "none",
            "control": {"pool_sizes": tuple(sizes.split(",")) if sizes else ()},
            "scaling": {"period_s": 20.0},
        }
        manager = PoolManagerSettings(allow_network=True, **settings)
        made = replace(made, manager=manager, scales=placement.autoscale)
        if not placement.switch_roles:
            return made
        whole = deployment({Role.EPD: 1}).kinds[Kind(Role.EPD)]
        text: dict[str, Any] = {"model": Path("model"), "switchable": Role.EPD, "engine": {"kv_cache_bytes": 1 << 34}}
        texts = {pool: TextSettings(role=pool.role, **text) for pool in made.sizes}
        return replace(made, kinds=dict.fromkeys(made.sizes, whole), texts=texts)


def tried(asked: Question, **more: Any) -> tuple[Findings, PlanRecord]:
    factory = Services(dict.fromkeys(asked.devices, 1.0), **more)
    findings = search(asked, factory)
    try_modes(findings, factory)
    return findings, conclude(findings)


def trace(folder: Path, gaps_s: Sequence[tuple[int, float]]) -> Path:
    """So many text requests with so much time between them, one part after the other."""
    path, at_s, lines = folder / "trace.jsonl", 0.0, []
    for count, gap_s in gaps_s:
        for _ in range(count):
            at_s += gap_s
            lines.append(json.dumps({"arrival_s": at_s, "text_tokens": 300, "output_tokens": 20}))
    path.write_text("\n".join(lines))
    return path


def test_where_the_rate_does_not_vary_the_plan_says_that_switching_and_scaling_were_not_tried() -> None:
    findings, plan = tried(question({"device": 2}, 8.0, rounds=ONE_ROUND), roles=(Role.EPD,))
    assert findings.untried == {
        "role switching": "the rate does not vary",
        "autoscaling": "the rate does not vary",
        "lending": "the best placements have no instances that encode and prefill beside others that only prefill",
    }
    assert "role switching was not tried: the rate does not vary" in plan.why
    assert not any(each.placement.autoscale or each.placement.switch_roles for each in plan.candidates)


@pytest.mark.timeout(240)
def test_pools_that_follow_their_load_cost_the_hours_that_they_have(tmp_path: Path) -> None:
    """The peak at the beginning takes several instances, and what comes after it one: the plan's price is that of all of them together."""
    recorded = trace(tmp_path, [(400, 0.025), (100, 2.0)])
    asked = question({"device": 4}, 2.3, rounds=ONE_ROUND)
    asked = replace(asked, workload=replace(workload(), trace=recorded, duration_s=float("inf")))
    findings, plan = tried(asked, roles=(Role.EPD,))
    scaled = [each for each in plan.candidates if each.placement.autoscale]
    assert scaled, findings.untried
    for each in scaled:
        assert each.note == "pools follow their load"
        assert each.predicted.fidelity == "services"
        assert each.predicted.prices is not None
        assert each.predicted.goodput is not None
        assert each.predicted.goodput.is_bound
        assert "pool-sizes" in each.placement.settings
        assert each.predicted.prices.usd_per_hour < 4.0
    assert "role switching was not tried: instances of the best placements serve all stages" in plan.why


@pytest.mark.timeout(240)
def test_roles_switch_only_where_the_rate_varies_and_are_judged_by_the_same_requests() -> None:
    asked = question({"device": 3}, None, rounds=ONE_ROUND)
    asked = replace(asked, workload=replace(asked.workload, burstiness=4.0))
    findings, plan = tried(asked, roles=(Role.E, Role.PD))
    switching = [each for each in plan.candidates if each.placement.switch_roles]
    assert switching, findings.untried
    assert {each.predicted.figures.all.requests for each in plan.candidates} == {
        switching[0].predicted.figures.all.requests
    }
    assert findings.untried["autoscaling"] == "it saves only what instances cost"
    no_tpot = replace(asked, objectives=Objectives(OBJECTIVES.ttft_s, None))
    findings, _ = tried(no_tpot, roles=(Role.E, Role.PD))
    assert "objectives" in findings.untried["role switching"]
