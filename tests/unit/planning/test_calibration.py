"""Calibration: what verifications say of the next predictions."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.planning.kit import OBJECTIVES, ROUNDS, Factory, all_points, conclude, question, wanted
from tests.unit.runtime.test_plans import PLACEMENT
from triptych.domain.stage import Role
from triptych.planning.calibration import (
    LATEST,
    UNVERIFIED,
    BadCalibration,
    Calibration,
    Figure,
    Verified,
    add,
    beside,
    factors_of,
    kinds_of,
    times_of,
)
from triptych.planning.planner import search
from triptych.runtime.plans import Budget
from triptych.workload.report import Latency, Record
from triptych.workload.requests import Planned

VERIFIED = Verified(
    "2026-11-29T16:00:00+00:00", "llava", "h100+l4", str(PLACEMENT), 2.0, 40, {"ttft_p50": 2.0, "ttft_p90": 1.5}, False
)
OTHER = replace(PLACEMENT, devices={Role.E: "h100", Role.PD: "h100"})


def test_what_is_added_is_read_and_multiplies_predictions_of_the_same_devices(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "verified.jsonl"
    assert Calibration.read(path).factor(kinds_of(PLACEMENT), "ttft") == 1.0
    add(path, replace(VERIFIED, factors={"ttft_p50": 4.0, "ttft_p90": 1.0, "ttft_p99": 9.0}))
    known = Calibration.read(path)
    assert kinds_of(PLACEMENT) == VERIFIED.devices
    assert known.factor(kinds_of(PLACEMENT), "ttft") == pytest.approx(2.0), "the geometric mean of P50 and P90"
    add(path, replace(VERIFIED, factors={"ttft_p50": 0.5, "ttft_p90": 0.5}))
    assert Calibration.read(path).factor(kinds_of(PLACEMENT), "ttft") == pytest.approx(1.0)
    assert known.factor(kinds_of(PLACEMENT), "tpot") == 1.0
    assert known.factor(kinds_of(OTHER), "ttft") == 1.0
    assert known.of("llava") == known
    assert known.of("qwen") == Calibration()


def test_the_latest_verifications_count() -> None:
    old, new = (replace(VERIFIED, factors={"ttft_p50": factor}) for factor in (9.0, 1.1))
    known = Calibration((old, *[new] * LATEST))
    assert known.factor(kinds_of(PLACEMENT), "ttft") == pytest.approx(1.1)


def test_times_of_simulated_requests_are_multiplied() -> None:
    known = Calibration((replace(VERIFIED, factors={"ttft_p50": 2.0, "tpot_p90": 0.5}),))
    planned = Planned(0.0, 1, (), 11)
    answered, refused = Record(planned, ttft_s=1.0, end_s=2.0, tokens=11), Record(planned, end_s=0.1, error="HTTP 429")
    corrected = known.corrected(PLACEMENT, [answered, refused])
    assert [corrected[0].ttft_s, corrected[0].tpot_s, corrected[0].end_s] == [2.0, pytest.approx(0.05), 2.5]
    assert corrected[1] == refused
    assert known.corrected(OTHER, [answered]) == [answered]


@pytest.mark.slow
def test_the_plan_after_a_verification_predicts_corrected_times() -> None:
    factors: dict[Figure, float] = {"ttft_p50": 1.5, "ttft_p90": 1.5, "tpot_p50": 0.9}
    known = Calibration((replace(VERIFIED, devices="device", factors=factors),))
    asked = question({"device": 1}, 1.0, rounds=ROUNDS[:1])
    before, after = (
        conclude(search(replace(asked, calibration=calibration), Factory({"device": 1.0}))).candidates[0]
        for calibration in (UNVERIFIED, known)
    )
    assert before.placement == after.placement
    first, second = (candidate.predicted.figures.all for candidate in (before, after))
    assert second.ttft.p50_s == pytest.approx(1.5 * (first.ttft.p50_s or 0.0))
    assert second.tpot.p50_s == pytest.approx(0.9 * (first.tpot.p50_s or 0.0))


def test_the_closed_form_multiplies_its_times_as_well() -> None:
    known = Calibration((replace(VERIFIED, devices="device", factors={"ttft_p50": 2.0, "tpot_p50": 1.5}),))
    strict = replace(OBJECTIVES, ttft_s=(OBJECTIVES.ttft_s or 0.0) / 2, tpot_s=(OBJECTIVES.tpot_s or 0.0) / 1.5)
    budget = Budget({"device": 3}, None, 0.0)
    verified, expected, before = (
        all_points(what, budget) for what in (replace(wanted(), calibration=known), wanted(strict), wanted())
    )
    for point, other, first in zip(verified, expected, before, strict=True):
        rate = 0.3 * point.peak_per_s
        assert point.judge(rate).attainment == pytest.approx(other.judge(rate).attainment)
        assert point.judge(rate).ttft_s == pytest.approx(2 * first.judge(rate).ttft_s)
        assert point.alone_s()[0]["decode"] == pytest.approx(1.5 * first.alone_s()[0]["decode"])


def test_factors_are_of_figures_that_both_have() -> None:
    predicted = times_of(Latency(1.0, 1.0, 2.0, None), Latency(None, None, None, None))
    assert predicted == {"ttft_p50": 1.0, "ttft_p90": 2.0}
    measured = times_of(Latency(1.0, 3.0, 0.0, 9.0), Latency(0.1, 0.1, 0.1, 0.1))
    assert factors_of(predicted, measured) == {"ttft_p50": 3.0}


def test_it_is_beside_the_profiles_where_they_are_not_read_as_one(tmp_path: Path) -> None:
    assert beside(tmp_path) == tmp_path / "verified.jsonl"
    assert beside(tmp_path / "decoder.json") == tmp_path / "verified.jsonl"
    assert not beside(tmp_path).match("*.json")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 2: at: Field required"),
        ("no", "line 2: : Invalid JSON"),
        ('{"at":"","model_id":"","devices":"","placement":"","rate":1.0,"requests":1,"factors":{"ttft_p50":0.0},"within":true}',
         "line 2: a factor is not between 0.001 and 1000"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_verification_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "verified.jsonl"
    add(path, VERIFIED)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BadCalibration) as error:
        Calibration.read(path)
    assert message in str(error.value)
