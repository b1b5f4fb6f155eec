"""Decisions on sizes, as ``triptych up`` tells them."""

from dataclasses import replace

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
from triptych.domain.pool import ManagerStatus, PoolStatus
from triptych.domain.stage import Role
from triptych.domain.windows import Judged

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


def status(*decisions: DecisionSummary, incarnation: int = 1) -> ManagerStatus:
    scaling = ScalingStatus(
        "m/E", PoolState.GROWING, Acting.ALL, 2, 1, 0, 0, Bounds(1, 8), Judged(9, 1), None, "", decisions
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
