"""Successive halving: placements are simulated in short runs, the better ones in longer runs, and the last by a closer fidelity.

All placements serve the same requests: those of a seed are the same at every rate. For each placement and seed the goodput is looked for,
from what was expected of it on. Pure: the caller makes the runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from triptych.domain.stage import Role
from triptych.runtime.plans import Placement
from triptych.sim.outcome import Outcome
from triptych.workload.fidelity import Fidelity
from triptych.workload.report import Objectives, Record, percentile, summarize
from triptych.workload.search import Bracket, RateSearch

HEADROOM: Mapping["Purpose", float] = {"-20 %": 0.8, "+20 %": 1.2}
"""Shares of the plan's rate at which the last placements are tried as well."""
_MOST = 8.0
"""The end of a search, of its beginning."""
_BEGINNINGS = 6
"""Of a search whose beginning is too high each time, at most: two steps lower."""


@dataclass(frozen=True, slots=True)
class Round:
    """How closely placements are looked at, and how many of them go on to the next round."""

    requests: int
    """Of a run, at least."""
    waits: float
    """How many times the objective of the first token a run lasts at least."""
    seeds: int
    precision: float
    """Of the goodput, as a share."""
    fidelity: Fidelity
    keeps: int
    begin: float = 0.8
    """Where the search of the goodput begins, of what is expected."""
    step: float = 1.3
    """How much higher the next rate is while none is too high."""
    tries_headroom: bool = False
    most_requests: int = 6000
    """Of a run, at most. At high rates it is to last as long all the same: in a short run no queue grows, and any rate seems to be borne."""

    def length(self, rate: float, objectives: Objectives) -> int:
        """Requests of a run."""
        return min(self.most_requests, max(self.requests, round(self.waits * (objectives.ttft_s or 0.0) * rate)))


ROUNDS = (
    Round(150, 4, 1, 0.12, "queues", keeps=10),
    Round(300, 8, 2, 0.05, "queues", keeps=4, begin=0.9, step=1.15, most_requests=9600),
    Round(300, 6, 2, 0.05, "machines", keeps=0, begin=0.93, step=1.1, tries_headroom=True),
)


@dataclass(slots=True, eq=False)
class Contender:
    """A placement in the search. ``expected_rps``: its goodput, by what is known so far."""

    placement: Placement
    usd_per_hour: float | None
    expected_rps: float
    varies: "Contender | None" = None
    """The contender that it varies."""
    note: str = ""
    """How its settings vary."""
    results: "dict[int, Result]" = field(default_factory=dict)
    """By round."""
    fault: str = ""
    """Why it cannot be simulated."""

    @property
    def result(self) -> "Result | None":
        """The last that is whole."""
        return next((self.results[at] for at in sorted(self.results, reverse=True) if self.results[at].is_whole), None)

    @property
    def origins(self) -> "list[Contender]":
        """What it varies, then what that varies, and so on."""
        return [] if self.varies is None else [self.varies, *self.varies.origins]

    @property
    def is_monolith(self) -> bool:
        return tuple(self.placement.roles) == (Role.EPD,) and not self.placement.more


@dataclass(slots=True)
class Result:
    """Figures of a contender in a round: at the plan's rate, and its goodput by seed."""

    round: Round
    seeds: Sequence[int]
    at_rate: dict[int, Sequence[Record]] = field(default_factory=dict)
    """What came of the requests at the plan's rate, by seed."""
    headroom: dict[str, list[float]] = field(default_factory=dict)
    """Attainment at shares of it, of each seed."""
    searches: dict[int, RateSearch] = field(default_factory=dict)
    beginnings: dict[int, int] = field(default_factory=dict)
    """How many searches of a seed have begun."""
    goodputs: dict[int, float] = field(default_factory=dict)
    is_bound: bool = False
    """Whether goodputs are at least these: no other rates were tried."""
    open: int = 0
    """Runs that have not ended."""

    @property
    def is_whole(self) -> bool:
        return not self.open and len(self.goodputs) == len(self.seeds) == len(self.at_rate)

    @property
    def goodput_rps(self) -> float:
        return sum(self.goodputs.values()) / len(self.goodputs)

    @property
    def records(self) -> list[Record]:
        return [record for records in self.at_rate.values() for record in records]

    def ttft_s(self, share: float) -> float:
        """A quantile of the time to the first token of all requests; those without one take for ever."""
        values = [inf if record.ttft_s is None or not record.ok else record.ttft_s for record in self.records]
        ordered = sorted(values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else inf

    def tpot_s(self, share: float) -> float:
        values = [record.tpot_s for record in self.records if record.tpot_s is not None]
        return percentile(values, 100 * share) if values else 0.0

    def attainment(self, objectives: Objectives) -> float:
        records = self.records
        return sum(map(objectives.met, records)) / len(records) if records else 0.0


Purpose = Literal["rate", "goodput", "-20 %", "+20 %"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A run to make."""

    contender: Contender
    at: int
    """Number of the round."""
    purpose: Purpose
    rate: float
    seed: int
    requests: int
    fidelity: Fidelity

    @property
    def duration_s(self) -> float:
        return self.requests / self.rate


@dataclass(frozen=True, slots=True)
class Aim:
    """What is looked for."""

    rate: float
    objectives: Objectives
    attainment: float
    first_seed: int
    prefers: Literal["cheapest", "goodput", "ttft"]


Vary = Callable[[Sequence[Contender]], Sequence[Contender]]
"""Variants of the best contenders of a round, for the next."""


class Halving:
    """The search. ``first`` are the runs to begin with; ``took`` takes one that has ended, and says which follow."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        aim: Aim,
        vary: Vary,
        rounds: Sequence[Round] = ROUNDS,
        *,
        vary_last: Vary = lambda _: (),
    ) -> None:
        """``vary``: variants after the first round. ``vary_last``: those for the last round alone."""
        self.contenders = list(contenders)
        self.rejected: list[tuple[Contender, str]] = []
        """Those that were given up, with the reason."""
        self._aim = aim
        self._vary, self._vary_last = vary, vary_last
        self._rounds = rounds
        self._at = 0
        self._entered: list[Contender] = []
        """Those of this round."""

    @property
    def finalists(self) -> list[Contender]:
        """Those that have figures and were not given up, best first."""
        return self._ranked([each for each in self.contenders if each.result is not None and not each.fault])

    def first(self) -> list[Trial]:
        return self._enter(self.contenders)

    def took(self, trial: Trial, outcome: Outcome) -> list[Trial]:
        """The runs that follow from one that has ended. Its records are those that count."""
        aim, result = self._aim, trial.contender.results[trial.at]
        result.open -= 1
        share = summarize(outcome.records, aim.objectives, trial.rate).attainment or 0.0 if outcome.records else 0.0
        follow: list[Trial] = []
        if trial.purpose == "rate":
            result.at_rate[trial.seed] = outcome.records
        elif trial.purpose == "goodput":
            follow = self._searched(trial, result, is_good=share >= aim.attainment)
        else:
            result.headroom.setdefault(trial.purpose, []).append(share)
        result.open += len(follow)
        return follow or self._next_round()

    def failed(self, trial: Trial, reason: str) -> list[Trial]:
        """A placement cannot be simulated."""
        trial.contender.fault = reason
        trial.contender.results[trial.at].open -= 1
        return self._next_round()

    # --- one contender ------------------------------------------------------------------------------------------------

    def _enter(self, contenders: Sequence[Contender]) -> list[Trial]:
        """Begin a round."""
        self._entered = list(contenders)
        return [trial for contender in contenders for trial in self._begun(contender)]

    def _begun(self, contender: Contender) -> list[Trial]:
        aim, now = self._aim, self._rounds[self._at]
        seeds = range(aim.first_seed, aim.first_seed + now.seeds)
        result = contender.results[self._at] = Result(now, seeds)
        trials = []
        for seed in seeds:
            trials.append(self._trial(contender, "rate", aim.rate, seed))
            if now.tries_headroom:
                trials += [
                    self._trial(contender, purpose, share * aim.rate, seed) for purpose, share in HEADROOM.items()
                ]
            trials.append(self._search_from(contender, result, seed, now.begin * contender.expected_rps))
        result.open = len(trials)
        return trials

    def _trial(self, contender: Contender, purpose: Purpose, rate: float, seed: int) -> Trial:
        now = self._rounds[self._at]
        requests = now.length(rate, self._aim.objectives)
        return Trial(contender, self._at, purpose, rate, seed, requests, now.fidelity)

    def _search_from(self, contender: Contender, result: Result, seed: int, rate: float) -> Trial:
        least = max(rate, 1e-3)
        result.searches[seed] = RateSearch(Bracket(least, _MOST * least), result.round.precision)
        result.beginnings[seed] = result.beginnings.get(seed, 0) + 1
        return self._trial(contender, "goodput", least, seed)

    def _searched(self, trial: Trial, result: Result, *, is_good: bool) -> list[Trial]:
        seed, search = trial.seed, result.searches[trial.seed]
        search.tried(trial.rate, is_good=is_good)
        if (rate := search.next_rate) is not None:
            if search.too_high is None:  # steps up from the expected rate, smaller than a doubling
                rate = min(rate, result.round.step * trial.rate)
            return [self._trial(trial.contender, "goodput", rate, seed)]
        if search.good is None and result.beginnings[seed] < _BEGINNINGS:
            return [self._search_from(trial.contender, result, seed, trial.rate / result.round.step**2)]
        result.goodputs[seed] = search.good or 0.0
        return []

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _next_round(self) -> list[Trial]:
        """The runs of the next round, once this one is over."""
        entered = self._entered
        if any(contender.results[self._at].open for contender in entered) or self._at + 1 >= len(self._rounds):
            return []
        for contender in entered:
            if contender.fault:
                self.rejected.append((contender, contender.fault))
                self.contenders.remove(contender)
        staying = self._survivors([contender for contender in entered if not contender.fault])
        if not staying:
            return []
        more = [*self._vary(staying)] if self._at == 0 else []
        if self._at + 2 == len(self._rounds):
            more += self._vary_last(self._ranked(staying))
        self.contenders += more
        staying += more
        for contender in staying:
            if contender.result is not None and contender.result.goodput_rps:
                contender.expected_rps = contender.result.goodput_rps
        self._at += 1
        return self._enter(staying)

    def _survivors(self, contenders: Sequence[Contender]) -> list[Contender]:
        """The best of each kind, and the best with the whole model on each instance."""
        keeps = self._rounds[self._at].keeps
        orders = [
            self._ranked(contenders),
            sorted(contenders, key=_by_goodput),
            sorted(contenders, key=self._by_price),
            sorted(contenders, key=self._by_ttft),
        ]
        chosen = [next((contender for contender in orders[0] if contender.is_monolith), orders[0][0])]
        for place in range(len(contenders)):
            for order in orders:
                if order[place] not in chosen and len(chosen) < keeps:
                    chosen.append(order[place])
        for contender in contenders:
            if contender not in chosen:
                self.rejected.append((contender, self._reason(contender, orders[0][0])))
                self.contenders.remove(contender)
        return chosen

    def _reason(self, contender: Contender, best: Contender) -> str:
        own, of_best = contender.result, best.result
        if own is None or of_best is None:
            return "it was not simulated to the end"
        price = "" if contender.usd_per_hour is None else f" at ${contender.usd_per_hour:.2f}/h"
        others = "" if best.usd_per_hour is None else f" at ${best.usd_per_hour:.2f}/h"
        return (
            f"round {self._at + 1}: goodput {own.goodput_rps:.3g} requests/s{price}; "
            f"{best.placement} has {of_best.goodput_rps:.3g}{others}"
        )

    def _ranked(self, contenders: Sequence[Contender]) -> list[Contender]:
        keys: dict[str, Callable[[Contender], tuple[float, ...]]] = {
            "cheapest": self._by_price,
            "goodput": _by_goodput,
            "ttft": self._by_ttft,
        }
        return sorted(contenders, key=keys[self._aim.prefers])

    def meets(self, contender: Contender) -> bool:
        """Whether the objectives are met at the plan's rate."""
        result = contender.result
        return result is not None and result.attainment(self._aim.objectives) >= self._aim.attainment

    def _by_price(self, contender: Contender) -> tuple[float, ...]:
        """Those that meet the objectives first, the cheapest of them first, by the cent; others by how close they come."""
        goodput = 0.0 if contender.result is None else contender.result.goodput_rps
        devices = float(sum(contender.placement.device_counts.values()))
        price = devices if contender.usd_per_hour is None else round(contender.usd_per_hour, 2)
        return (0.0, price, -goodput) if self.meets(contender) else (1.0, -goodput, price)

    def _by_ttft(self, contender: Contender) -> tuple[float, ...]:
        ttft_s = inf if contender.result is None else contender.result.ttft_s(0.9)
        return (0.0 if self.meets(contender) else 1.0, ttft_s)


def _by_goodput(contender: Contender) -> tuple[float, ...]:
    """The highest first; of equal ones the cheaper."""
    goodput = 0.0 if contender.result is None else contender.result.goodput_rps
    return -goodput, contender.usd_per_hour or 0.0
