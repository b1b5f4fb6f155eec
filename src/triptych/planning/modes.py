"""Modes in which the best placements are tried as well: roles that switch, pools that follow their load, encoders that lend.

Services alone simulate them, which takes ten times as long as machines. So two placements are tried, after the last round. All that is left
of the search serves the same requests then: of a trace as many as there are, up to a bound.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import ceil, inf

from triptych.domain.stage import Role, Stage
from triptych.runtime.plans import Placement
from triptych.sim.limits import NotSimulated
from triptych.sim.outcome import Outcome
from triptych.sim.runs import CannotSimulate, Job, counted, side_by_side
from triptych.sim.scenario import Deployment
from triptych.workload.report import Record, summarize
from triptych.workload.requests import Plan
from triptych.workload.workload import Workload

from .planner import WARM_UP, Factory, Findings, Note, Progress, Question
from .search import Contender, Halving, Result

_BEST = 2
"""Placements that are varied."""
_MOST_REQUESTS = 1500
_BETTER = 1.06
"""The multiple of a goodput at which a mode is tried, where goodput is preferred: more than the margin of what is simpler."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode, and the placements that can have it."""

    name: str
    option: str
    note: str
    """Of candidates that have it."""
    why_not: Callable[[Contender, Question], str]
    """Why a placement is not tried with it; empty if it is."""
    applied: Callable[[Placement, Question], Placement]


def varies(workload: Workload) -> bool:
    """Whether the rate of a workload varies in time."""
    return workload.trace is not None or workload.burstiness > 1


def _cannot_switch(contender: Contender, question: Question) -> str:
    placement, objectives = contender.placement, question.objectives
    kinds = {(pool.device, pool.degree) for pool in placement.pools.values()}
    if not varies(question.workload):
        return "the rate does not vary"
    if None in (objectives.ttft_s, objectives.tpot_s):
        return "it takes objectives for the time to the first token and between tokens"
    if len(placement.roles) < 2:
        return "instances of the best placements serve all stages"
    return "the devices of the best placements differ" if len(kinds) > 1 else ""


def _cannot_scale(contender: Contender, question: Question) -> str:
    if not varies(question.workload):
        return "the rate does not vary"
    if question.prefers != "cheapest":
        return "it saves only what instances cost"
    if contender.usd_per_hour is None:
        return "a device has no price"
    return "a role of the best placements has several kinds of devices" if contender.placement.more else ""


def _cannot_lend(contender: Contender, question: Question) -> str:
    del question
    prefilling = [role for role in contender.placement.roles if role.serves(Stage.PREFILL)]
    lenders = [role for role in prefilling if role.serves(Stage.ENCODE)]
    return (
        ""
        if 0 < len(lenders) < len(prefilling)
        else "the best placements have no instances that encode and prefill beside others that only prefill"
    )


def _scaled(placement: Placement, question: Question) -> Placement:
    """Pools have from half of their size to what the budget's devices allow, divided among them: in a simulation they cannot share devices."""
    most = _shared_out(placement, question)
    sizes = ",".join(f"{role.value}={ceil(count / 2)}-{most[role]}" for role, count in placement.roles.items())
    return replace(placement, autoscale=True, settings={**placement.settings, "pool-sizes": sizes})


def _shared_out(placement: Placement, question: Question) -> dict[Role, int]:
    """The largest sizes of pools: in all no more than the budget's devices, or twice those planned where it has no number of a kind."""
    most, used = dict(placement.roles), placement.device_counts
    bounded = {role for role in most if question.devices[placement.devices[role]] is not None}
    most |= {role: 2 * count for role, count in most.items() if role not in bounded}
    growing = [role for role in most if role in bounded]
    while growing:
        for role in list(growing):
            device, degree = placement.devices[role], placement.degrees[role]
            if used[device] + degree > (question.devices[device] or 0):
                growing.remove(role)
            else:
                used[device] += degree
                most[role] += 1
    return most


def _lending(placement: Placement, question: Question) -> Placement:
    del question
    return replace(placement, settings={**placement.settings, "lending": "idle", "encode-first": "yes"})


MODES = (
    Mode(
        "role switching",
        "switch-roles",
        "roles switch",
        _cannot_switch,
        lambda placement, _: replace(placement, switch_roles=True),
    ),
    Mode("autoscaling", "pool-sizes", "pools follow their load", _cannot_scale, _scaled),
    Mode("lending", "lending", "encoders lend", _cannot_lend, _lending),
)


def try_modes(findings: Findings, factory: Factory, note: Note = lambda _: None) -> None:
    """Add variants of the best to the contenders, with results, and to the findings which modes were not tried, and why."""
    halving, question = findings.halving, findings.question
    if halving is None or findings.interrupted or not halving.finalists:
        return
    deployments: dict[int, Deployment] = {}
    tried: dict[str, list[Contender]] = {}
    untried: dict[str, str] = {}
    for contender in _best(halving):
        for mode in MODES:
            given = mode.option in factory.given
            if reason := "it is set for all placements" if given else mode.why_not(contender, question):
                untried.setdefault(mode.name, reason)
                continue
            variant = _varied(contender, mode, question)
            try:
                deployments[id(variant)] = factory.deployment(variant.placement)
            except ValueError as error:
                untried.setdefault(mode.name, str(error))
            else:
                tried.setdefault(mode.name, []).append(variant)
    variants = [variant for of_mode in tried.values() for variant in of_mode]
    if variants:
        deployments |= {id(each): factory.deployment(each.placement) for each in halving.finalists}
        try:
            _Trial(findings, halving.finalists, variants, deployments).carry_out(note)
            most = inf if question.usd_per_hour is None else question.usd_per_hour
            halving.contenders += [variant for variant in variants if (variant.usd_per_hour or 0.0) <= most]
        except KeyboardInterrupt:
            findings.interrupted = True
        except (CannotSimulate, NotSimulated) as error:
            untried |= dict.fromkeys(tried, str(error))
            tried = {}
    findings.untried = {name: reason for name, reason in untried.items() if name not in tried}


def _best(halving: Halving) -> Sequence[Contender]:
    """The best and the next; after the best, a cheaper one that misses the objectives comes first, as a mode may help it."""
    best, *others = halving.finalists

    def is_cheaper(contender: Contender) -> bool:
        return not halving.meets(contender) and (contender.usd_per_hour or inf) < (best.usd_per_hour or inf)

    return [best, *sorted(others, key=lambda each: not is_cheaper(each))][:_BEST]


def _varied(contender: Contender, mode: Mode, question: Question) -> Contender:
    return Contender(
        mode.applied(contender.placement, question),
        contender.usd_per_hour,
        contender.expected_rps,
        varies=contender,
        note=", ".join(text for text in (contender.note, mode.note) if text),
    )


Task = tuple[Contender, int, float]
"""A contender, a seed and a rate."""


@dataclass(slots=True)
class _Trial:
    """Runs of the variants by services, and of the finalists by machines, under the same requests."""

    findings: Findings
    finalists: Sequence[Contender]
    variants: Sequence[Contender]
    deployments: Mapping[int, Deployment]
    """By the identity of contenders."""
    plans: dict[tuple[float, int], Plan] = field(default_factory=dict)
    outcomes: dict[tuple[int, int, float], Outcome] = field(default_factory=dict)
    """By the identity of the contender, seed and rate."""

    def carry_out(self, note: Note) -> None:
        """Make the runs, and give all of them their results. Raises CannotSimulate, NotSimulated and KeyboardInterrupt."""
        tasks = [*self._tasks(self.finalists), *self._tasks(self.variants)]
        rounds = len(self.findings.question.rounds)
        with closing(side_by_side([(task, self._job(*task)) for task in tasks], lambda *_: ())) as ending:
            for number, ((contender, seed, rate), outcome) in enumerate(ending, start=1):
                self.outcomes[id(contender), seed, rate] = self._corrected(contender, outcome)
                note(Progress(rounds, rounds, number, len(tasks), "modes of the best"))
        for contender in self.variants:
            contender.results[rounds] = self._of_variant(contender)
            if contender.placement.autoscale:
                contender.usd_per_hour = self._usd_per_hour(contender)
        for contender in self.finalists:
            contender.results[rounds] = replace(_result(contender), at_rate=self._at_rate(contender))

    def _tasks(self, contenders: Sequence[Contender]) -> Iterator[Task]:
        for contender in contenders:
            for seed in _result(contender).seeds:
                for rate in {self.findings.budget.rate, self._tried_rps(contender)}:
                    yield contender, seed, rate

    def _tried_rps(self, contender: Contender) -> float:
        """The rate that a variant is to bear: the plan's, or a higher one than its origin bears."""
        if contender in self.finalists or self.findings.question.prefers != "goodput":
            return self.findings.budget.rate
        return _BETTER * _result(contender).goodput_rps or self.findings.budget.rate

    def _job(self, contender: Contender, seed: int, rate: float) -> Job:
        question = self.findings.question
        if (rate, seed) not in self.plans:
            duration_s = question.rounds[-1].length(rate, question.objectives) / rate
            if question.workload.trace is not None:
                duration_s = max(duration_s, question.workload.duration_s)
            timed = replace(question.workload, duration_s=min(duration_s, _MOST_REQUESTS / rate))
            self.plans[rate, seed] = timed.plan(rate, seed)
        fidelity = question.rounds[-1].fidelity if contender in self.finalists else "services"
        deployment, plan = self.deployments[id(contender)], self.plans[rate, seed]
        return Job(deployment, plan, fidelity, seed, rate, question.timeout_s)

    def _corrected(self, contender: Contender, outcome: Outcome) -> Outcome:
        """Without the warm-up, and with what verifications of plans say."""
        of_run = counted(outcome, WARM_UP * self.plans[outcome.rate, outcome.seed].duration_s)
        records = self.findings.question.calibration.corrected(contender.placement, of_run.records)
        return replace(of_run, records=records)

    # --- results ------------------------------------------------------------------------------------------------------

    def _at_rate(self, contender: Contender) -> dict[int, Sequence[Record]]:
        rate = self.findings.budget.rate
        return {seed: self.outcomes[id(contender), seed, rate].records for seed in _result(contender).seeds}

    def _of_variant(self, contender: Contender) -> Result:
        """Its goodput is at least the rate that it bears of those that were tried."""
        seeds, rates = _result(contender).seeds, (self._tried_rps(contender), self.findings.budget.rate)
        goodputs = {
            seed: max((rate for rate in rates if self._bears(self.outcomes[id(contender), seed, rate])), default=0.0)
            for seed in seeds
        }
        last = replace(self.findings.question.rounds[-1], fidelity="services")
        return Result(last, seeds, self._at_rate(contender), goodputs=goodputs, is_bound=True)

    def _bears(self, outcome: Outcome) -> bool:
        question = self.findings.question
        share = summarize(outcome.records, question.objectives, outcome.rate).attainment if outcome.records else None
        return (share or 0.0) >= question.attainment

    def _usd_per_hour(self, contender: Contender) -> float:
        """What the devices cost that it has had, per hour of the runs."""
        offers = [instance.offer for instances in self.findings.offers.values() for instance in instances]
        prices = {offer.device: (offer.usd_per_hour or 0.0) / offer.degree for offer in offers}
        seeds, rate = _result(contender).seeds, self.findings.budget.rate
        runs = [self.outcomes[id(contender), seed, rate] for seed in seeds]
        dollars = sum(hours * prices[device] for run in runs for device, hours in run.device_hours().items())
        return 3600 * dollars / sum(run.ended_s for run in runs)


def _result(contender: Contender) -> Result:
    """Of a finalist, or of that which it varies."""
    result = contender.result or (contender.varies and contender.varies.result)
    assert result  # noqa: S101 - finalists have one
    return result
