"""Calibration: what verifications say of the next predictions."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.planning.test_record import PLACEMENT
from triptych.domain.stage import Role
from triptych.planning.calibration import (
    LATEST,
    BadCalibration,
    Calibration,
    Verified,
    add,
    beside,
    factors_of,
    kinds_of,
    times_of,
)
from triptych.workload.report import Latency, Objectives

VERIFIED = Verified(
    "2026-11-29T16:00:00+00:00", "llava", "h100+l4", str(PLACEMENT), 2.0, 40, {"ttft_p50": 2.0, "ttft_p90": 1.5}, False
)
OTHER = replace(PLACEMENT, devices={Role.E: "h100", Role.PD: "h100"})


def test_what_is_added_is_read_and_multiplies_predictions_of_the_same_devices(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "verified.jsonl"
    assert Calibration.read(path).factor("llava", PLACEMENT, "ttft_p50") == 1.0
    add(path, VERIFIED)
    add(path, replace(VERIFIED, factors={"ttft_p50": 0.5}))
    known = Calibration.read(path)
    assert known.verified[0] == VERIFIED
    assert kinds_of(PLACEMENT) == VERIFIED.devices
    assert known.factor("llava", PLACEMENT, "ttft_p50") == pytest.approx(1.0), "the geometric mean"
    assert known.factor("llava", PLACEMENT, "ttft_p90") == 1.5
    assert known.factor("llava", PLACEMENT, "tpot_p50") == 1.0
    assert known.factor("llava", OTHER, "ttft_p90") == 1.0
    assert known.factor("qwen", PLACEMENT, "ttft_p90") == 1.0


def test_the_latest_verifications_count() -> None:
    old, new = replace(VERIFIED, factors={"ttft_p50": 9.0}), replace(VERIFIED, factors={"ttft_p50": 1.1})
    known = Calibration((old, *[new] * LATEST))
    assert known.factor("llava", PLACEMENT, "ttft_p50") == pytest.approx(1.1)


def test_predictions_and_objectives_are_corrected_by_the_factors() -> None:
    known = Calibration((VERIFIED,))
    corrected = known.corrected("llava", PLACEMENT, Latency(0.1, 0.1, 0.2, None), "ttft")
    assert corrected == Latency(0.2, 0.2, pytest.approx(0.3), None)  # type: ignore[arg-type]  # compares as a number
    assert known.predicted_objectives("llava", PLACEMENT, Objectives(3.0, None)) == Objectives(2.0, None)


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
