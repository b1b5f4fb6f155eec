"""From a question to a plan, with simulations of engines with simple costs."""

from dataclasses import replace

import pytest

from tests.unit.planning.kit import OBJECTIVES, ROUNDS, Factory, all_points, conclude, question, wanted
from tests.unit.sim.kit import IMAGE, MIX
from triptych.domain.stage import Role
from triptych.planning import planner
from triptych.planning.planner import Findings, Progress, Question, contender_of, search
from triptych.planning.shortlist import Scored
from triptych.runtime.plans import Budget, Options, Placement, PlanRecord
from triptych.sim.scenario import Deployment
from triptych.workload.report import Objectives
from triptych.workload.requests import Distribution, Mix, WorkloadError

pytestmark = pytest.mark.slow


def planned(asked: Question, factory: Factory | None = None) -> tuple[Findings, PlanRecord]:
    findings = search(asked, factory or Factory(dict.fromkeys(asked.devices, 1.0)))
    return findings, conclude(findings)


@pytest.fixture(scope="module")
def without_rate() -> Findings:
    """What a search finds that looks for as many requests as four devices can serve."""
    return search(question({"device": 4}, None), Factory({"device": 1.0}))


def test_the_cheapest_placement_for_a_rate_is_found() -> None:
    notes: list[Progress] = []
    asked = question({"device": 6}, 30.0)
    findings = search(asked, Factory({"device": 1.0}), notes.append)
    concluded = conclude(findings)
    best = concluded.candidates[0]
    assert best.meets
    assert (best.predicted.figures.all.attainment or 0.0) >= 0.9
    assert best.predicted.prices is not None
    prices = [sum(each.placement.device_counts.values()) for each in concluded.candidates if each.meets]
    assert sum(concluded.candidates[concluded.winners["cheapest"]].placement.device_counts.values()) == min(prices)
    assert 0 in concluded.front or concluded.front
    if sum(best.placement.device_counts.values()) == min(prices):
        assert concluded.winners["cheapest"] == 0, "of equal prices the chosen one"
    assert all(each.lacks for each in concluded.candidates[1:])
    assert any("busiest stage" in line for line in concluded.why)
    [shadow] = concluded.shadow_prices
    assert shadow.device == "device"
    assert shadow.goodput_rps >= 0
    assert set(best.predicted.headroom) == {"-20 %", "+20 %"}
    assert best.predicted.headroom["-20 %"] >= best.predicted.headroom["+20 %"] - 0.05
    assert best.predicted.binds in best.predicted.utilization
    assert set(best.predicted.figures.by_kind) == {"text", "image"}
    assert (notes[0].round, notes[0].known) == (0, 0), "the filter"
    assert notes[-1].done == notes[-1].known
    assert notes[-1].round == len(ROUNDS)


def test_without_a_rate_the_highest_goodput_is_chosen(without_rate: Findings) -> None:
    concluded = conclude(without_rate)
    best = concluded.candidates[0]
    goodputs = [each.predicted.goodput.rps for each in concluded.candidates if each.predicted.goodput is not None]
    assert best.predicted.goodput is not None
    assert best.predicted.goodput.rps >= 0.95 * max(goodputs)
    assert sum(best.placement.device_counts.values()) == 4
    assert without_rate.budget.rate < max(goodputs)


@pytest.mark.extended
def test_cheap_devices_are_used_where_they_do() -> None:
    factory = Factory({"cheap": 1.0, "dear": 4.0})
    _, concluded = planned(question({"cheap": 4, "dear": 4}, 15.0, rounds=ROUNDS[:1]), factory)
    best = concluded.candidates[0]
    assert set(best.placement.devices.values()) == {"cheap"}, "all devices are equally fast"
    assert {each.device for each in concluded.shadow_prices} == {"cheap"}


def test_a_placement_that_is_hardly_better_gives_way_to_the_simplest(
    without_rate: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.planning.conclusion.SIMPLER", 10.0)
    concluded = conclude(without_rate)
    assert tuple(concluded.candidates[0].placement.roles) == (Role.EPD,)
    best = concluded.winners["goodput"]
    assert best == 0 or any("this one is simpler" in line for line in concluded.why)


def test_what_no_request_meets_alone_is_said_with_its_stage() -> None:
    _, concluded = planned(question({"device": 4}, 5.0, objectives=Objectives(ttft_s=0.03, tpot_s=0.001)))
    assert concluded.candidates == ()
    assert concluded.infeasible is not None
    text = " ".join(concluded.infeasible.reasons)
    assert "a TTFT of at most 30 ms: image requests take up to" in text
    assert "ms of them to" in text
    assert "a TPOT of at most 1 ms: a decode step of one text request takes" in text
    assert concluded.infeasible.larger is None, "no number of devices helps"


@pytest.mark.extended
def test_a_rate_beyond_the_budget_has_the_nearest_plan_that_serves_it() -> None:
    _, concluded = planned(question({"device": 2}, 60.0, rounds=ROUNDS[:1]))
    assert concluded.infeasible is not None
    assert concluded.infeasible.larger is not None
    assert sum(concluded.infeasible.larger.device_counts.values()) > 2
    assert concluded.infeasible.larger_usd_per_hour == sum(concluded.infeasible.larger.device_counts.values())


def test_an_interrupted_search_concludes_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question({"device": 3}, None)
    seen: list[Progress] = []

    def note(progress: Progress) -> None:
        seen.append(replace(progress))
        if progress.round == 2:
            raise KeyboardInterrupt

    findings = search(asked, Factory({"device": 1.0}), note)
    assert findings.interrupted
    concluded = conclude(findings)
    assert concluded.candidates
    assert concluded.candidates[0].predicted.fidelity == "queues"
    assert not concluded.candidates[0].predicted.headroom
    del monkeypatch

    def at_once(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(asked, Factory({"device": 1.0}), at_once)


@pytest.mark.extended
def test_a_placement_that_cannot_be_made_is_given_up() -> None:
    class Refusing(Factory):
        def deployment(self, placement: Placement) -> Deployment:
            if Role.P in placement.roles:
                raise ValueError("no prefill apart")
            return super().deployment(placement)

    findings, concluded = planned(question({"device": 3}, None, rounds=ROUNDS[:1] * 2), Refusing({"device": 1.0}))
    assert concluded.candidates
    assert all(Role.P not in each.placement.roles for each in concluded.candidates)
    refused = [each for each in concluded.rejected if each.reason == "no prefill apart"]
    was_tried = [scored for scored in findings.shortlist.chosen if Role.P in scored.point.method.roles]
    assert len(refused) == len(was_tried)


def test_a_workload_that_the_model_cannot_serve_is_refused() -> None:
    mix = Mix(MIX.images, Distribution.parse("90000"), MIX.output_tokens, IMAGE)
    asked = question({"device": 3}, 1.0)
    with pytest.raises(WorkloadError, match="no request can be served"):
        search(replace(asked, workload=replace(asked.workload, mix=mix)), Factory({"device": 1.0}))


@pytest.mark.extended
def test_preparing_cores_are_as_many_as_are_needed() -> None:
    findings, concluded = planned(question({"device": 3}, 2.0, rounds=ROUNDS[:1]))
    assert concluded.candidates[0].placement.prepare_cores <= 3
    assert findings.question.objectives == OBJECTIVES
    assert planner.sample(findings.question.workload, None).requests


def test_copies_are_bounded_where_answers_are_decoded_and_given_options_are_kept() -> None:
    found = all_points(wanted(), Budget({"device": 3}, None, 0.0), Factory({"device": 1.0}, limits=None))

    def settings(roles: tuple[Role, ...], *given: str) -> Options:
        point = next(point for point in found if point.method.roles == roles)
        return contender_of(Scored(point, 1.0), 1.0, 4, given).placement.settings

    apart = settings((Role.E, Role.P, Role.D))
    assert apart["kv-bytes-per-step"] == str(38 << 20), "5 ms at 8 GB/s"
    assert {"max-batch-items", "max-sequences"} <= apart.keys()
    assert "kv-bytes-per-step" not in settings((Role.E, Role.PD))
    kept = settings((Role.E, Role.P, Role.D), "kv-bytes-per-step", "max-sequences")
    assert kept.keys() == {"max-batch-items"}
