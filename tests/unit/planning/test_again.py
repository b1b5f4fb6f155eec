"""Plans that are made again for a mix that is seen."""

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.cli.plan.plans import placement, plan_of
from tests.unit.planning.kit import MODEL, OBJECTIVES, Factory
from tests.unit.sim.kit import CONTROL_S, FAMILY, IMAGE
from triptych.domain.mix import Form, Mix
from triptych.domain.replanning import PlanQuestion, Proposal, by_kind, in_letters, role_counts
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role
from triptych.planning.again import Conditions, Search
from triptych.planning.demand import Demand
from triptych.planning.observed import ObservedMix, request_of
from triptych.runtime.plans import Budget, PlacedPool
from triptych.workload.requests import Clip, Distribution, Size, WorkloadError, synthetic
from triptych.workload.requests import Mix as Drawn

TEXT = Drawn(Distribution.parse("0"), Distribution.parse("64,300"), Distribution.parse("20,60"), IMAGE)
IMAGES = replace(TEXT, images=Distribution.parse("2:0.5,4:0.5"))


def mix_of(drawn: Drawn, requests: int = 300) -> Mix:
    """As routers count it."""
    rng = random.Random("1")
    planned = synthetic(drawn, rate=1.0, duration_s=float(requests), burstiness=1.0, rng=rng).requests
    return Demand.of(planned, FAMILY, MODEL, 1.0).mix


def asked(present: dict[Role, int], drawn: Drawn, rate: float, **more: Any) -> PlanQuestion:
    kinds = frozenset(Kind(role) for role in Role)
    fields: dict[str, Any] = {"kinds": kinds, "most": {"": 8}, "scales": True, "gain": 0.1}
    counts = role_counts({Kind(role): count for role, count in present.items()})
    return PlanQuestion(counts, mix_of(drawn), rate, **(fields | more))


def proposed(question: PlanQuestion) -> Proposal:
    counts = {kind.role.value: count for kind, count in by_kind(question.present).items()}
    placed = placement(counts, "device", settings={"encoder-routing": "predicted"})
    plan = replace(
        plan_of(placed, budget=Budget({"device": 8}, None, question.rate)), objectives=OBJECTIVES, attainment=0.9
    )
    factory = Factory({"device": 1.0})
    return Search(plan, question, factory, Conditions(1.0, CONTROL_S, 60.0)).run()


def instances(proposal: Proposal) -> int:
    return sum(entry.count for entry in proposal.wanted)


@pytest.mark.slow
def test_a_placement_that_does_for_the_mix_is_kept() -> None:
    question = asked({Role.EPD: 1}, TEXT, 4.0)
    found = proposed(question)
    assert (found.wanted, found.gain) == (question.present, 0.0)
    assert "meets the objectives" in found.reason


@pytest.mark.slow
def test_more_instances_are_proposed_where_the_mix_has_become_heavier() -> None:
    found = proposed(asked({Role.EPD: 1}, IMAGES, 8.0))
    assert instances(found) > 1
    assert found.gain > 0.1
    assert "within the objectives at 8 requests/s" in found.reason


@pytest.mark.slow
def test_fewer_are_proposed_where_they_do() -> None:
    found = proposed(asked({Role.E: 4, Role.PD: 4}, TEXT, 4.0))
    assert instances(found) < 4
    assert found.gain >= 0.5
    assert "fewer instances" in found.reason


@pytest.mark.slow
def test_where_nothing_starts_instances_their_number_stays() -> None:
    question = asked({Role.E: 1, Role.PD: 5}, IMAGES, 10.0, scales=False, most={"": 6})
    assert instances(proposed(question)) == 6


@pytest.mark.slow
def test_only_roles_that_instances_can_have_are_proposed() -> None:
    question = asked({Role.E: 1, Role.PD: 1}, IMAGES, 10.0, kinds=frozenset({Kind(Role.E), Kind(Role.PD)}))
    assert {kind.role for kind in by_kind(proposed(question).wanted)} == {Role.E, Role.PD}


TIERS = frozenset({Kind(Role.E, "cheap"), Kind(Role.PD, "cheap"), Kind(Role.PD, "dear")})


def of_tiers(encoders: int, cheap: int, dear: int, drawn: Drawn, rate: float, **more: Any) -> Proposal:
    """Of a cluster on two kinds of devices that are alike but for their prices."""
    placed = placement(
        {"E": encoders, "PD": cheap}, "cheap", more=(PlacedPool(Role.PD, dear, "dear", 1),) if dear else ()
    )
    plan = replace(plan_of(placed, budget=Budget({"cheap": 6, "dear": 3}, None, rate)), objectives=OBJECTIVES)
    present = role_counts({Kind(Role.E, "cheap"): encoders, Kind(Role.PD, "cheap"): cheap, Kind(Role.PD, "dear"): dear})
    fields: dict[str, Any] = {"kinds": TIERS, "most": {"cheap": 6, "dear": 3}, "scales": True, "gain": 0.1}
    question = replace(PlanQuestion(present, mix_of(drawn), rate, **fields), **more)
    return Search(plan, question, Factory({"cheap": 1.0, "dear": 3.0}), Conditions(1.0, CONTROL_S, 60.0)).run()


@pytest.mark.slow
def test_with_several_kinds_of_devices_the_dear_ones_are_given_up_first() -> None:
    found = of_tiers(2, 2, 2, TEXT, 4.0)
    assert by_kind(found.wanted)[Kind(Role.PD, "dear")] == 0
    assert "cheaper" in found.reason
    assert found.gain >= 0.5


@pytest.mark.slow
def test_where_nothing_starts_instances_each_tier_keeps_its_number() -> None:
    found = of_tiers(1, 4, 1, IMAGES, 20.0, scales=False)
    wanted = by_kind(found.wanted)
    assert (wanted[Kind(Role.E, "cheap")] + wanted[Kind(Role.PD, "cheap")], wanted[Kind(Role.PD, "dear")]) == (5, 1)
    assert wanted[Kind(Role.E, "cheap")] > 1, in_letters(found.wanted)


@pytest.mark.slow
def test_an_instance_on_devices_that_the_plan_does_not_have_is_refused() -> None:
    present = role_counts({Kind(Role.E, "cheap"): 1, Kind(Role.PD, "other"): 1})
    with pytest.raises(ValueError, match="the plan has no tier 'other'"):
        of_tiers(1, 1, 1, TEXT, 4.0, present=present)


# --- observed requests ------------------------------------------------------------------------------------------------


def test_observed_requests_are_like_those_that_were_counted() -> None:
    observed = ObservedMix.of(mix_of(IMAGES), FAMILY, MODEL)
    rng = random.Random("2")
    again = synthetic(observed, rate=1.0, duration_s=2000.0, burstiness=1.0, rng=rng).requests
    assert {len(planned.images) for planned in again} == {2, 4}
    before, now = mix_of(IMAGES), Demand.of(again, FAMILY, MODEL, 1.0).mix

    def means(mix: Mix) -> list[float]:
        names = ("items", "pixels", "prompt_tokens", "output_tokens")
        return [sum(getattr(form, name) for form in mix.forms) / mix.requests for name in names]

    assert means(now) == pytest.approx(means(before), rel=0.1)


def test_videos_and_sounds_have_their_lengths() -> None:
    """Also where the model does not take them: the form alone says it."""
    video = Form("video", 10, 0, 20, 20 * 32 * 56 * 56, 20 * 32, 80.0, 5000)
    sound = Form("audio", 4, 0, 4, 4 * 80_000, 4, 20.0, 500)
    assert request_of(video, 1).videos == (Clip(Size(56, 56), 4.0),) * 2
    assert request_of(sound, 1).sounds_s == (5.0,)


def test_requests_get_the_answers_of_those_that_ended_with_the_same_form_or_the_usual_one() -> None:
    short, long = (Form("text", 0, 10, prompt_tokens=1000, output_tokens=10 * tokens) for tokens in (30, 100))
    other = Form("text", 5, 0, prompt_tokens=5000)
    mix = Mix.of([Form("text", 20, 0, prompt_tokens=2000), short, long, other])
    drawn = ObservedMix.of(mix, FAMILY, MODEL)
    assert sorted((planned.text_tokens > 500, planned.output_tokens) for planned in drawn.requests) == [
        (False, 30),
        (False, 100),
        (True, 65),
    ]


def test_a_mix_that_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(WorkloadError, match="the mix cannot be served"):
        ObservedMix.of(Mix.of([Form("text", 10, 0, prompt_tokens=10_000_000)]), FAMILY, MODEL)
