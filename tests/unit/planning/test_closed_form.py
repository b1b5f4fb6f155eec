"""Placements in closed form, beside simulations by queues."""

from collections.abc import Mapping
from itertools import pairwise

import pytest

from tests.unit.planning.kit import OBJECTIVES, Factory, all_points, wanted
from tests.unit.sim.kit import MIX, deployment, plan
from triptych.domain.stage import Role
from triptych.planning.closed_form import Point
from triptych.planning.combination import METHODS
from triptych.runtime.plans import Budget
from triptych.sim.queues import run as queues
from triptych.workload.report import Objectives, summarize
from triptych.workload.requests import Distribution, Mix
from triptych.workload.search import Bracket, RateSearch

BUDGET = Budget({"device": 6}, None, 0.0)
PLACEMENTS: tuple[Mapping[Role, int], ...] = (
    {Role.EPD: 3},
    {Role.E: 2, Role.PD: 2},
    {Role.E: 4, Role.PD: 2},
    {Role.E: 2, Role.P: 2, Role.D: 2},
    {Role.EP: 3, Role.D: 2},
    {Role.P: 2, Role.ED: 3},
)


def point_of(sizes: Mapping[Role, int], found: list[Point]) -> Point:
    for point in found:
        if {pool.instance.offer.role: pool.count for pool in point.pools} == sizes:
            return point
    raise AssertionError(sizes)


def simulated_goodput(sizes: Mapping[Role, int], expected: float, objectives: Objectives, mix: Mix = MIX) -> float:
    search = RateSearch(Bracket(expected / 2, 2 * expected), 0.08)
    while (rate := search.next_rate) is not None:
        made = deployment(sizes, text={"engine": {"kv_cache_bytes": 1 << 34}})
        outcome = queues.simulate(made, plan(rate, max(300, int(8 * rate)), mix=mix), timeout_s=60.0)
        share = summarize(outcome.records, objectives, rate).attainment or 0.0
        search.tried(rate, is_good=share >= 0.9)
    return search.good or 0.0


@pytest.mark.slow
def test_goodputs_are_about_those_of_simulations() -> None:
    """The filter has to keep what is best, not to predict it: within a third, and the better of two that differ by half."""
    found = all_points(wanted(), BUDGET)
    pairs = []
    for sizes in PLACEMENTS:
        expected = point_of(sizes, found).goodput()
        pairs.append((expected, simulated_goodput(sizes, expected, OBJECTIVES)))
    for sizes, (expected, simulated) in zip(PLACEMENTS, pairs, strict=True):
        assert expected == pytest.approx(simulated, rel=0.35), (sizes, pairs)
    for first, first_rps in pairs:
        for second, second_rps in pairs:
            if first_rps > 1.5 * second_rps:
                assert first > second, pairs


def test_a_higher_rate_is_never_better() -> None:
    for point in all_points(wanted(), Budget({"device": 4}, None, 0.0)):
        shares = [point.judge(point.peak_per_s * share).attainment for share in (0.05, 0.3, 0.5, 0.7, 0.9, 0.99)]
        assert all(later <= before + 0.02 for before, later in pairwise(shares)), (
            point.pools,
            shares,
        )
        assert point.judge(1.01 * point.peak_per_s).attainment == 0.0


def test_another_instance_of_what_is_busiest_bears_more() -> None:
    found = all_points(wanted(), BUDGET)
    base = point_of({Role.E: 1, Role.PD: 2}, found)
    more = point_of({Role.E: 2, Role.PD: 2}, found)
    assert base.judge(0.9 * base.peak_per_s).binds == "encode"
    assert more.peak_per_s > base.peak_per_s
    assert more.goodput() > base.goodput()


def test_objectives_that_one_request_misses_are_met_at_no_rate() -> None:
    found = all_points(wanted(Objectives(ttft_s=0.02)), Budget({"device": 2}, None, 0.0))
    assert all(point.goodput() == 0.0 for point in found)
    slowest = max(sum(steps.values()) - steps["decode"] for steps in found[0].alone_s())
    assert slowest > 0.02


def test_a_special_role_takes_its_part_of_a_stage() -> None:
    found = all_points(wanted(), BUDGET)
    point = point_of({Role.E: 1, Role.EPD: 3}, found)
    assert point.method == METHODS[5]
    assert 0 < point.special_share < 1
    judged = point.judge(0.5 * point.peak_per_s)
    assert judged.utilization["encode"] == pytest.approx(0.5, abs=0.05), "both are as busy"
    assert sum(judged.utilization[stage] for stage in ("prefill", "decode")) < 0.5
    texts = Mix(Distribution.parse("0"), MIX.text_tokens, MIX.output_tokens, MIX.size)
    alone = point_of({Role.E: 1, Role.EPD: 3}, all_points(wanted(mix=texts), BUDGET))
    assert alone.goodput() == pytest.approx(
        point_of({Role.EPD: 3}, all_points(wanted(mix=texts), BUDGET)).goodput(), rel=0.01
    ), "encoders do nothing for texts"


def test_dearer_devices_cost_more() -> None:
    found = all_points(wanted(), Budget({"a": 2, "b": 2}, None, 0.0), Factory({"a": 1.0, "b": 3.0}))
    prices = {point.usd_per_hour for point in found if point.method == METHODS[0]}
    assert prices == {1.0, 2.0, 3.0, 6.0}
