"""``triptych plan verify`` against a gateway with a scripted router."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.plan.plans import placement, plan_of, triptych, written
from tests.unit.cli.test_main import Stub
from tests.unit.runtime.test_plans import PLAN
from tests.unit.services.gateway.fakes import HELLO
from triptych.errors import Overloaded
from triptych.planning.calibration import Calibration, kinds_of
from triptych.runtime.plans import Figures, KindFigures, PlanRecord
from triptych.workload.report import Latency, Objectives

PLACED = placement({"EPD": 1})
NONE = Latency(None, None, None, None)


@pytest.fixture(scope="module")
def shared_gateway() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


@pytest.fixture
def gateway(shared_gateway: Stub) -> Stub:
    shared_gateway.plays(HELLO)
    return shared_gateway


def plan_with(folder: Path, ttft_s: float, *, expected_error: float | None = 10.0, **more: Any) -> PlanRecord:
    """A plan that predicts this time to the first token, for twenty requests or so of text in half a second."""
    kind = KindFigures(20, 20, Latency(*[ttft_s] * 4), NONE, 1.0)
    fields = {
        "workload": {"rate": "40", "duration": "0.5", "images": "0", "burstiness": "0"},
        "objectives": Objectives(5.0, None),
        "common": {"profiles": str(folder)},
        "made": replace(PLAN.made, expected_error=expected_error),
    }
    plan = plan_of(PLACED, **{**fields, **more})
    predicted = replace(plan.candidates[0].predicted, figures=Figures(40.0, kind, {}))
    return replace(plan, candidates=(replace(plan.candidates[0], predicted=predicted),))


def verified(folder: Path, gateway: Stub, plan: PlanRecord, *arguments: object, status: int = 0) -> str:
    return triptych("plan", "verify", written(folder, plan), "--url", gateway.url, *arguments, status=status)


def test_a_cluster_that_does_what_was_predicted_passes(tmp_path: Path, gateway: Stub) -> None:
    said = " ".join(verified(tmp_path, gateway, plan_with(tmp_path, 0.02)).split())
    assert "all TTFT P50 20.0 ms" in said
    assert "too few requests" in said, "of P99"
    assert "attainment: predicted 100.0%, measured 100.0%, wanted 90%" in said
    assert "passed: all figures that are judged are within 1000%" in said


def test_a_figure_beyond_the_expected_error_fails_and_is_kept_for_the_next_plan(tmp_path: Path, gateway: Stub) -> None:
    said = verified(tmp_path, gateway, plan_with(tmp_path, 30.0, expected_error=0.1), status=1)
    assert "failed: beyond 10%: TTFT P50 (all), TTFT P90 (all)" in said
    (entry,) = Calibration.read(tmp_path / "verified.jsonl").verified
    assert (entry.model_id, entry.devices, entry.within) == ("triptych-demo", "cpu", False)
    assert set(entry.factors) == {"ttft_p50", "ttft_p90"}
    assert 0 < Calibration((entry,)).factor(kinds_of(PLACED), "ttft") < 0.5


def test_a_document_has_all_figures_and_where_they_are_kept(tmp_path: Path, gateway: Stub) -> None:
    kept = tmp_path / "kept.jsonl"
    plan = plan_with(tmp_path, 30.0)
    path = written(tmp_path, plan)
    said = triptych(
        "plan", "verify", path, "--url", gateway.url, "--json", "--calibration", kept, "--error", 0.2, status=1
    )
    document = json.loads(said[said.index("{\n") :])
    assert (document["passed"], document["keeps_promise"], document["expected_error"]) == (False, True, 0.2)
    first = document["figures"][0]
    assert (first["kind"], first["figure"], first["predicted"], first["is_within"]) == ("all", "TTFT P50", 30.0, False)
    assert first["error"] == pytest.approx(30.0 / first["measured"] - 1)
    assert document["report"]["answered"] == 20
    assert document["calibration"] == str(kept)
    assert kept.exists()


def test_missed_objectives_and_refused_requests_fail(tmp_path: Path, gateway: Stub) -> None:
    said = verified(tmp_path, gateway, plan_with(tmp_path, 0.02, objectives=Objectives(1e-6, None)), status=1)
    assert "failed: the cluster does not meet the objectives, or requests failed" in said
    gateway.plays([Overloaded("full")])
    said = verified(tmp_path, gateway, plan_with(tmp_path, 0.02), status=1)
    assert "the cluster does not meet the objectives" in said


def test_a_shorter_load_can_be_offered(tmp_path: Path, gateway: Stub) -> None:
    assert "4 requests in 0.1 s" in verified(tmp_path, gateway, plan_with(tmp_path, 0.02), "--duration", 0.1)


def test_a_plan_for_several_rates_or_another_model_is_refused(tmp_path: Path, gateway: Stub) -> None:
    several = plan_with(tmp_path, 0.02, workload={"sweep": "1,2", "images": "0"})
    assert "the plan's workload has several rates" in verified(tmp_path, gateway, several, status=2)
    said = verified(tmp_path, gateway, plan_with(tmp_path, 0.02), "--model", "nope", status=2)
    assert "does not serve 'nope'" in said
