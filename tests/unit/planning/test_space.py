"""Placements within a budget: all of them, each once, and of too many those that count."""

from dataclasses import replace
from time import process_time

import pytest

from tests.unit.planning.kit import Factory, all_points, question, there_are, wanted
from tests.unit.sim.kit import IMAGE
from triptych.domain.stage import ModelPart, Role
from triptych.engine.delay import synthetic_decoder_profile
from triptych.planning import space
from triptych.planning.closed_form import Point
from triptych.planning.combination import METHODS
from triptych.planning.planner import contender_of, with_mixed
from triptych.planning.pools import Offer
from triptych.planning.shortlist import Shortlist, shortlist
from triptych.planning.space import Bounds, points
from triptych.policy.roofline import DoesNotFit
from triptych.runtime.plans import Budget
from triptych.workload.requests import Distribution, Mix


def placed(point: Point) -> tuple[tuple[str, str, int], ...]:
    return tuple((pool.instance.offer.role.value, pool.instance.offer.device, pool.count) for pool in point.pools)


def test_each_placement_is_there_once_and_within_the_devices() -> None:
    found = [placed(point) for point in all_points(wanted(), Budget({"a": 3, "b": 1}, None, 0.0))]
    assert len(found) == len(set(found))
    for pools in found:
        for device, most in (("a", 3), ("b", 1)):
            assert sum(count for _, name, count in pools if name == device) <= most
    alone = [pools for pools in found if len(pools) == 1]
    assert sorted(pools[0] for pools in alone) == [("EPD", "a", 1), ("EPD", "a", 2), ("EPD", "a", 3), ("EPD", "b", 1)]
    assert {tuple(role for role, _, _ in pools) for pools in found} == {
        tuple(role.value for role in method.roles) for method in METHODS
    }


def test_a_price_bounds_them() -> None:
    factory = Factory({"a": 1.0, "b": 2.5})
    found = all_points(wanted(), Budget({"a": None, "b": None}, 5.0, 0.0), factory)
    prices = [point.usd_per_hour or 0.0 for point in found]
    assert max(prices) == 5.0
    assert any(count == 5 for point in found for _, _, count in placed(point))


def test_a_rate_bounds_them_where_nothing_else_does() -> None:
    what, budget = wanted(), Budget({"a": None}, None, 20.0)
    there = there_are(what, budget, Factory({"a": 1.0}))
    found = list(points(there, Bounds(budget, 20.0), what))
    assert max(point.peak_per_s for point in found) > 40.0
    assert len(found) < 20_000


def test_of_too_many_the_best_are_among_those_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    what, budget = wanted(), Budget({"a": 9}, None, 0.0)
    every = all_points(what, budget)
    monkeypatch.setattr(space, "_ALL_COUNTS", 0)
    some = all_points(what, budget)
    assert len(some) < len(every)
    assert {placed(point) for point in some} <= {placed(point) for point in every}
    for method in METHODS:
        best, of_some = (max(point.peak_per_s for point in found if point.method == method) for found in (every, some))
        assert of_some == pytest.approx(best, rel=0.02), method


def test_the_filter_finds_what_trying_all_finds() -> None:
    what = wanted()
    found = all_points(what, Budget({"a": 5}, None, 0.0))
    goodputs = {placed(point): point.goodput() for point in found}
    best = max(goodputs.values())
    chosen = shortlist(found, None, 24)
    assert chosen.points == len(found)
    assert max(scored.goodput_rps for scored in chosen.chosen) == pytest.approx(best)
    rate = 0.5 * best
    able = [point for point in found if point.meets(rate)]
    least = min(point.usd_per_hour or 0.0 for point in able)
    cheapest = min(scored.price for scored in shortlist(found, rate, 24).chosen if scored.point.meets(rate))
    assert cheapest == least
    assert any(scored.point.method == METHODS[0] for scored in chosen.chosen)
    assert all(reason.startswith("closed form: goodput") for _, reason in chosen.passed_over)


class Slow(Factory):
    """Decode steps on the device ``slow`` miss the objective."""

    def offer(self, role: Role, device: str, degree: int) -> Offer:
        offer = super().offer(role, device, degree)
        if device != "slow" or ModelPart.DECODER not in offer.kind.profiles:
            return offer
        decoder = synthetic_decoder_profile(step_s=0.07, sequence_s=0.0, prefill_token_s=1e-6, load_s=1.0)
        profiles = {**offer.kind.profiles, ModelPart.DECODER: decoder}
        return replace(offer, kind=replace(offer.kind, profiles=profiles))


def test_many_devices_that_miss_the_objectives_do_not_hide_few_that_meet_them() -> None:
    what, budget = wanted(), Budget({"slow": 8, "fast": 2}, None, 0.0)
    found = all_points(what, budget, Slow({"slow": 0.1, "fast": 1.0}))
    best = max(point.goodput() for point in found if "slow" not in {device for _, device, _ in placed(point)})
    chosen = shortlist(found, None, 24).chosen
    assert max(scored.goodput_rps for scored in chosen) >= best > 0
    for scored in chosen:
        assert ("PD", "slow") not in {(role, device) for role, device, _ in placed(scored.point)}


@pytest.mark.timeout(60)
def test_sixty_four_devices_of_three_kinds_are_filtered_in_seconds() -> None:
    what, budget = wanted(), Budget({"a": 16, "b": 16, "c": 32}, None, 0.0)
    there = there_are(what, budget, Factory({"a": 3.0, "b": 2.0, "c": 1.0}))
    found = shortlist(points(there, Bounds(budget, None), what), 100.0, 24, cheap_first=True)
    assert found.points > 50_000
    assert len(found.chosen) == 24
    assert all(scored.point.meets(100.0) for scored in found.chosen[:1])


def test_devices_that_hold_no_language_model_encode_only() -> None:
    factory = Factory({"small": 0.5, "large": 2.0}, too_small=("small",))
    found = all_points(wanted(), Budget({"small": 2, "large": 2}, None, 0.0), factory)
    assert {role for point in found for role, device, _ in placed(point) if device == "small"} == {"E"}
    with pytest.raises(DoesNotFit, match="small is too small"):
        all_points(wanted(), Budget({"small": 2}, None, 0.0), factory)


TEXT = Mix(Distribution.parse("0:0.95,1:0.05"), Distribution.parse("300"), Distribution.parse("40"), IMAGE)


def mixed_list(devices: dict[str, int], rate: float | None) -> tuple[Shortlist, Shortlist]:
    """What is worth a simulation with one kind of device in each role, and with two."""
    what, budget = wanted(mix=TEXT), Budget(dict(devices), None, rate or 0.0)
    there = there_are(what, budget, Factory({"a": 2.0, "b": 1.0, "c": 0.5}, roles=(Role.E, Role.PD)))
    bounds, asked = Bounds(budget, None), question(dict(devices), rate)
    found = shortlist(points(there, bounds, what), rate, 8, cheap_first=rate is not None)
    return found, with_mixed(found, there, bounds, what, asked)


def test_devices_that_would_idle_serve_in_a_role_beside_those_of_another_kind() -> None:
    """Two kinds that are alike, and nearly no images: with one kind in a role the pool of text has the four of one kind alone."""
    found, with_two = mixed_list({"a": 4, "b": 3}, None)
    best = max(with_two.chosen, key=lambda scored: scored.goodput_rps)
    assert best.goodput_rps > 1.3 * max(scored.goodput_rps for scored in found.chosen)
    assert best.point.devices == 7
    assert [role for role, _, _ in placed(best.point)] == ["E", "PD", "PD"]
    made = contender_of(best, 1.0, 4, ()).placement
    assert made.device_counts == {"a": 4, "b": 3}
    assert [str(kind) for kind in made.pools][1:] == ["PD@a", "PD@b"]
    assert len(with_two.chosen) <= 8
    alike = Budget({"a": 7}, None, 0.0)
    same = max(
        (point for point in all_points(wanted(mix=TEXT), alike) if placed(point) == (("E", "a", 1), ("PD", "a", 6))),
        key=lambda point: point.goodput(),
    )
    assert best.point.goodput() == pytest.approx(same.goodput(), rel=0.1), "two pools bear what one of all would"


def test_with_one_kind_of_device_or_where_none_idles_nothing_is_mixed() -> None:
    found, with_two = mixed_list({"a": 6}, None)
    assert with_two is found
    found, with_two = mixed_list({"a": 4, "b": 4}, 1.0)
    assert with_two.chosen == found.chosen


@pytest.mark.timeout(60)
def test_neighbours_with_two_kinds_of_sixty_four_devices_are_judged_in_seconds() -> None:
    what, budget = wanted(), Budget({"a": 16, "b": 16, "c": 32}, None, 0.0)
    there = there_are(what, budget, Factory({"a": 3.0, "b": 2.0, "c": 1.0}))
    bounds = Bounds(budget, None)
    found = shortlist(points(there, bounds, what), None, 24)
    began_s = process_time()
    with_mixed(found, there, bounds, what, question(dict(budget.devices), None))
    assert process_time() - began_s < 30


def test_engines_without_a_role_are_not_asked_for_it() -> None:
    found = all_points(wanted(), Budget({"a": 3}, None, 0.0), Factory({"a": 1.0}, roles=(Role.E, Role.PD)))
    assert {tuple(role for role, _, _ in placed(point)) for point in found} == {("E", "PD")}
