"""Successive halving, over runs whose outcome is known beforehand."""

import random
from collections.abc import Mapping, Sequence

import pytest

from triptych.domain.stage import Role
from triptych.planning.search import ROUNDS, Aim, Contender, Halving, Round, Trial
from triptych.runtime.plans import Placement
from triptych.sim.outcome import Outcome
from triptych.workload.report import Objectives, Record
from triptych.workload.requests import Planned

OBJECTIVES = Objectives(ttft_s=1.0)
LAST = len(ROUNDS) - 1


def contender(roles: Mapping[Role, int], price: float, expected: float) -> Contender:
    return Contender(Placement(roles, dict.fromkeys(roles, "l4"), dict.fromkeys(roles, 1), 1), price, expected)


class World:
    """Runs trials: a contender meets the objectives up to its goodput, in first-token times that grow with the load."""

    def __init__(self, goodputs: Mapping[Contender, float], *, noise: float = 0.0) -> None:
        self.goodputs = goodputs
        self.noise = noise
        self.trials: list[Trial] = []

    def outcome(self, trial: Trial) -> Outcome:
        self.trials.append(trial)
        goodput = self.goodputs[trial.contender]
        rng = random.Random(f"{trial.seed} {id(trial.contender)}")
        limit = goodput * (1 + self.noise * rng.uniform(-1, 1))
        load = trial.rate / limit if limit else 9.0
        ttft_s = 0.5 * load if load <= 1 else 2.0
        records = [Record(Planned(0.0, 10, (), 5), ttft_s=ttft_s, end_s=ttft_s + 1, prompt_tokens=10, tokens=5)] * 20
        return Outcome(trial.rate, trial.seed, records, [None] * 20, [], [], [], {}, 1.0, 0.0)

    def run(self, halving: Halving) -> None:
        waiting = halving.first()
        while waiting:
            trial = waiting.pop(0)
            waiting += halving.took(trial, self.outcome(trial))


def aim(rate: float, prefers: str = "goodput") -> Aim:
    return Aim(rate, OBJECTIVES, 0.9, 0, prefers)  # type: ignore[arg-type]


def field(count: int = 24) -> dict[Contender, float]:
    """Contenders with their goodputs, of which the expected are wrong by up to a third."""
    rng = random.Random(5)
    goodputs = {}
    for number in range(count):
        true = 10.0 + number
        roles = {Role.EPD: 2} if number == 3 else {Role.E: 1, Role.PD: number + 1}
        goodputs[contender(roles, 30.0 - number, true * rng.uniform(0.67, 1.33))] = true
    return goodputs


def test_the_best_comes_first_and_its_goodput_is_found() -> None:
    goodputs = field()
    halving, world = Halving(list(goodputs), aim(8.0), lambda _: []), World(goodputs, noise=0.02)
    world.run(halving)
    best = halving.finalists[0]
    assert goodputs[best] >= 32.0, "of 33"
    assert best.result is not None
    assert best.result.goodput_rps == pytest.approx(goodputs[best], rel=0.06)
    assert best.result.round is ROUNDS[LAST]
    assert set(best.result.headroom) == {"-20 %", "+20 %"}
    assert len(halving.finalists) + len(halving.rejected) == len(goodputs)
    assert all("goodput" in reason for _, reason in halving.rejected)


def test_later_rounds_have_fewer_placements_and_longer_runs() -> None:
    goodputs = field()
    halving, world = Halving(list(goodputs), aim(8.0), lambda _: []), World(goodputs)
    world.run(halving)
    entered = [{id(trial.contender) for trial in world.trials if trial.at == at} for at in range(len(ROUNDS))]
    assert [len(each) for each in entered] == [24, 10, 4]
    requests = [min(trial.requests for trial in world.trials if trial.at == at) for at in range(len(ROUNDS))]
    assert requests == sorted(requests)
    assert {trial.fidelity for trial in world.trials if trial.at == LAST} == {"machines"}


def test_runs_of_one_seed_and_rate_have_the_same_requests() -> None:
    goodputs = field(6)
    halving, world = Halving(list(goodputs), aim(8.0), lambda _: []), World(goodputs)
    world.run(halving)
    at_rate = [trial for trial in world.trials if trial.purpose == "rate" and trial.at == 0]
    assert len({(trial.rate, trial.seed, trial.requests) for trial in at_rate}) == 1


def test_the_whole_model_on_each_instance_stays_to_the_end() -> None:
    goodputs = field()
    halving = Halving(list(goodputs), aim(8.0), lambda _: [])
    World(goodputs).run(halving)
    assert any(each.is_monolith for each in halving.finalists)


def test_the_cheapest_that_serves_the_rate_is_preferred_to_what_serves_more() -> None:
    goodputs = field()
    halving = Halving(list(goodputs), aim(20.0, "cheapest"), lambda _: [])
    World(goodputs).run(halving)
    best = halving.finalists[0]
    assert halving.meets(best)
    meeting = [each for each in halving.finalists if halving.meets(each)]
    assert best.usd_per_hour == min(each.usd_per_hour or 0.0 for each in meeting)
    assert best.usd_per_hour == 7.0, "the dearest that serves less costs more"


def test_variants_of_the_best_enter_the_second_round() -> None:
    goodputs = field(4)
    varied: list[Contender] = []

    def vary(best: Sequence[Contender]) -> list[Contender]:
        first = best[0]
        varied.append(Contender(first.placement, first.usd_per_hour, first.expected_rps, varies=first, note="faster"))
        goodputs[varied[0]] = 1.3 * goodputs[first]
        return varied

    halving = Halving(list(goodputs), aim(8.0), vary)
    World(goodputs).run(halving)
    assert halving.finalists[0] is varied[0]
    assert 0 not in varied[0].results


def test_what_cannot_be_simulated_is_given_up_with_the_reason() -> None:
    goodputs = field(5)
    broken = list(goodputs)[4]
    halving, world = Halving(list(goodputs), aim(8.0), lambda _: []), World(goodputs)
    waiting = halving.first()
    while waiting:
        trial = waiting.pop(0)
        if trial.contender is broken:
            waiting += halving.failed(trial, "it does not fit")
        else:
            waiting += halving.took(trial, world.outcome(trial))
    assert (broken, "it does not fit") in halving.rejected
    assert broken not in halving.finalists
    assert halving.finalists[0].result is not None
    assert max(halving.finalists[0].results) == LAST


def test_a_placement_that_serves_nothing_has_no_goodput() -> None:
    goodputs = {contender({Role.EPD: 1}, 1.0, 5.0): 0.0}
    halving = Halving(list(goodputs), aim(5.0), lambda _: [])
    World(goodputs).run(halving)
    [only] = halving.finalists
    assert only.result is not None
    assert only.result.goodput_rps == 0.0
    assert not halving.meets(only)


def test_an_interrupted_search_has_the_results_of_the_rounds_that_were_over() -> None:
    goodputs = field()
    halving, world = Halving(list(goodputs), aim(8.0), lambda _: []), World(goodputs)
    assert halving.finalists == []
    waiting = halving.first()
    while waiting and waiting[0].at < 1:
        trial = waiting.pop(0)
        waiting += halving.took(trial, world.outcome(trial))
    best = halving.finalists[0]
    assert best.result is not None
    assert best.result.round is ROUNDS[0]


def test_a_goodput_far_from_what_was_expected_is_found_too() -> None:
    low, high = contender({Role.EPD: 1}, 1.0, 100.0), contender({Role.E: 1, Role.PD: 1}, 1.0, 4.0)
    goodputs = {low: 20.0, high: 12.0}
    rounds = (Round(50, 1, 1, 0.05, "queues", keeps=2),)
    halving = Halving(list(goodputs), aim(5.0), lambda _: [], rounds)
    World(goodputs).run(halving)
    for each in halving.finalists:
        assert each.result is not None
        assert each.result.goodput_rps == pytest.approx(goodputs[each], rel=0.06)
