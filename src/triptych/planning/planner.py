"""From a question to a plan: sample, offers, filter, simulation by halving, conclusion."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Literal, Protocol

from triptych.domain.instance import ModelInfo
from triptych.domain.stage import Role, Stage
from triptych.families.base import Family
from triptych.runtime.plans import Budget, Options, PlacedPool, Placement
from triptych.sim.limits import NotSimulated
from triptych.sim.outcome import Outcome
from triptych.sim.runs import CannotSimulate, Job, counted, side_by_side
from triptych.sim.scenario import Deployment
from triptych.workload.report import Objectives
from triptych.workload.requests import Plan
from triptych.workload.workload import Workload

from .calibration import UNVERIFIED, Calibration
from .closed_form import Point
from .combination import Wanted
from .demand import SAMPLE, Demand
from .offers import Supplier, offers
from .search import ROUNDS, Aim, Contender, Halving, Round, Trial
from .shortlist import Scored, Shortlist, shortlist
from .space import Bounds, Offers, mixed, points

Prefers = Literal["cheapest", "goodput", "ttft"]

_OF_GOODPUT = 0.7
"""Without a rate, figures are those at this share of the highest goodput by closed form."""
_BUSY_CORES = 0.4
"""Share of the time for which preparing cores are busy, at most, where there can be as many as that takes."""
_COPYING_S, _LEAST_COPIED = 0.005, 16 << 20
"""Time of a step with decodes in which keys and values are copied, at most, and their least number of bytes."""
WARM_UP = 0.1
"""Share of a run whose requests are not counted."""
_VARIED = 2
"""Placements whose settings are varied."""
_NEIGHBOURED = 8
"""Placements beside which those with two kinds of devices in one role are looked for: of the shortlist the first."""
_MIXED = 4
"""Those that are simulated, at most."""
_NOTED = 20_000
"""Placements from one note of progress to the next while they are filtered."""


class Factory(Supplier, Protocol):
    """Makes what is judged and simulated, of one model."""

    @property
    def family(self) -> Family: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def given(self) -> Collection[str]:
        """Names of options of services that are set for all placements, so that none sets them for itself."""
        ...

    @property
    def prepare_cores(self) -> int:
        """The most of an instance."""
        ...

    def deployment(self, placement: Placement) -> Deployment:
        """Raises ValueError for one that cannot be simulated, such as what does not fit."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned."""

    workload: Workload
    objectives: Objectives
    attainment: float
    devices: Mapping[str, int | None]
    usd_per_hour: float | None
    rate: float | None
    """Requests per second to serve; None: as many as the budget can."""
    prefers: Prefers
    timeout_s: float
    control_s: float
    contenders: int = 24
    """Placements that are simulated, at most, beside variants of the best."""
    rounds: Sequence[Round] = ROUNDS
    calibration: Calibration = UNVERIFIED
    """What verifications of earlier plans of the model say."""


@dataclass(slots=True)
class Progress:
    """How far a search is."""

    round: int
    """From 1 on; 0 while placements are filtered."""
    rounds: int
    done: int
    """Runs of all rounds; placements that were seen while they are filtered."""
    known: int
    """Runs that are known to be needed until now; 0 while placements are filtered."""
    best: str = ""


Note = Callable[[Progress], None]


@dataclass(slots=True)
class Findings:
    """What the search has found, for the conclusion."""

    question: Question
    budget: Budget
    wanted: Wanted
    offers: Offers
    shortlist: Shortlist
    halving: Halving | None
    points: dict[int, Point] = field(default_factory=dict)
    """Of contenders, by their identity."""
    interrupted: bool = False
    untried: Mapping[str, str] = field(default_factory=dict)
    """Modes that were not tried, each with the reason."""

    def point(self, contender: Contender) -> Point:
        return self.points[id([contender, *contender.origins][-1])]


def sample(workload: Workload, rate: float | None) -> Plan:
    """Requests that stand for the workload. Raises WorkloadError."""
    if workload.trace is not None:
        return workload.plan(rate)
    rate = rate or 1.0
    return replace(workload, duration_s=SAMPLE / rate).plan(rate)


def search(question: Question, factory: Factory, note: Note = lambda _: None) -> Findings:
    """Raises WorkloadError for a workload that cannot be served, DoesNotFit, and KeyboardInterrupt before there is any result."""
    drawn = sample(question.workload, question.rate)
    demand = Demand.of(drawn.requests, factory.family, factory.info, question.workload.burstiness)
    wanted = Wanted(demand, question.objectives, question.attainment, question.control_s, question.calibration)
    bounded = Budget(dict(question.devices), question.usd_per_hour, question.rate or 0.0)
    is_bounded = question.usd_per_hour is not None or None not in question.devices.values()
    there_are = offers(factory, bounded, wanted)
    bounds = Bounds(bounded, None if is_bounded else question.rate)
    found = shortlist(
        _noted(points(there_are, bounds, wanted), note, len(question.rounds)),
        question.rate,
        question.contenders,
        cheap_first=question.prefers == "cheapest",
    )
    found = with_mixed(found, there_are, bounds, wanted, question)
    rate = question.rate or _rounded(_OF_GOODPUT * max((scored.goodput_rps for scored in found.chosen), default=0.0))
    findings = Findings(question, replace(bounded, rate=rate), wanted, there_are, found, None)
    if not found.chosen or not rate:
        return findings
    contenders = []
    for scored in found.chosen:
        contender = contender_of(scored, rate, factory.prepare_cores, factory.given)
        findings.points[id(contender)] = scored.point
        contenders.append(contender)
    aim = Aim(rate, question.objectives, question.attainment, question.workload.seed, question.prefers)
    halving = findings.halving = Halving(
        contenders,
        aim,
        lambda best: variants(best, question, factory.given),
        question.rounds,
        vary_last=lambda best: predicting(best, factory.given),
    )
    _carry_out(findings, halving, factory, note)
    return findings


def with_mixed(found: Shortlist, there_are: Offers, bounds: Bounds, wanted: Wanted, question: Question) -> Shortlist:
    """The shortlist with placements of two kinds of devices in one role, in place of the last ones. Only those with a lower price at the
    rate, if that is preferred, else a higher goodput than any other placement by closed form.
    """
    if len(question.devices) < 2:
        return found
    near = mixed([scored.point for scored in found.chosen[:_NEIGHBOURED]], there_are, bounds, wanted)
    cheap_first = question.prefers == "cheapest"
    further = shortlist(near, question.rate, question.contenders, cheap_first=cheap_first)
    most_rps = max((scored.goodput_rps for scored in found.chosen), default=0.0)
    rate = question.rate or 0.0
    least = min((scored.price for scored in found.chosen if scored.goodput_rps >= rate), default=inf)
    better = [
        scored
        for scored in further.chosen
        if (scored.goodput_rps >= rate and scored.price < least if cheap_first else scored.goodput_rps > most_rps)
    ][: min(_MIXED, max(0, question.contenders - 1))]
    kept = found.chosen[: max(1, question.contenders - len(better))]
    return Shortlist([*kept, *better], found.passed_over, found.points + further.points)


def _noted(found: Iterable[Point], note: Note, rounds: int) -> Iterator[Point]:
    """The points, with a note now and then."""
    for count, point in enumerate(found):
        if count % _NOTED == 0:
            note(Progress(0, rounds, count, 0))
        yield point


def contender_of(scored: Scored, rate: float, prepare_cores: int, given: Collection[str]) -> Contender:
    """The contender for a point. ``prepare_cores``: the most of an instance. ``given``: options that it does not set."""
    point = scored.point
    settings: dict[str, str] = {}
    chosen = [
        (pool.instance.offer.role, pool.instance.limits) for pool in point.pools if not pool.instance.offer.limits
    ]
    if items := [limits.max_batch_items for role, limits in chosen if role.serves(Stage.ENCODE)]:
        settings["max-batch-items"] = str(max(items))
    if sequences := [limits.max_sequences for role, limits in chosen if role is not Role.E]:
        settings["max-sequences"] = str(max(sequences))
    copying = [
        pool.instance.offer.kind
        for pool in point.pools
        if pool.instance.hands_over and pool.instance.offer.role.serves(Stage.DECODE)
    ]
    if copying:
        nbytes = _COPYING_S * min(kind.copied_bytes_per_s for kind in copying)
        settings["kv-bytes-per-step"] = str(max(_LEAST_COPIED, int(nbytes) >> 20 << 20))
    cores = 1
    expected = max(rate, scored.goodput_rps)
    for pool in point.pools:
        if pool.instance.offer.role.serves(Stage.ENCODE):
            busy = expected * pool.instance.prepare_mean_s / pool.count / _BUSY_CORES
            at_once = max((need.items for need in pool.instance.needs), default=1) / pool.count
            cores = max(cores, ceil(busy), ceil(at_once))
    own = {name: value for name, value in settings.items() if name not in given}
    return Contender(
        placement_of(point, min(prepare_cores, cores), own), point.usd_per_hour, scored.goodput_rps or rate
    )


def placement_of(point: Point, prepare_cores: int = 1, settings: Options | None = None) -> Placement:
    """The placement of a point, which has no settings of its own."""
    placed = [
        PlacedPool(role, pool.count, pool.instance.offer.device, pool.instance.offer.degree)
        for role, pool in zip(point.method.roles, point.pools, strict=True)
    ]
    return Placement.of(placed, prepare_cores, settings or {})


def variants(best: Sequence[Contender], question: Question, given: Collection[str]) -> list[Contender]:
    """The best placements with other policies and step budgets. ``given``: options that stay as they are."""
    varied = []
    for contender in best[:_VARIED]:
        roles = contender.placement.sizes
        changes: list[tuple[str, Options]] = [("first come, first served", {"ordering": "first-come"})]
        beside = any(role.serves(Stage.DECODE) and len(role.stages) > 1 for role in roles)
        if question.objectives.tpot_s is not None and beside:
            changes.append(("steps within the objective", {"tpot-slo-s": f"{question.objectives.tpot_s:g}"}))
        if sum(count for role, count in roles.items() if role.serves(Stage.ENCODE)) > 1:
            changes.append(("items are not split", {"sharding": "never"}))
        varied += [_varied(contender, note, change) for note, change in changes if change.keys().isdisjoint(given)]
    return varied


def predicting(best: Sequence[Contender], given: Collection[str]) -> list[Contender]:
    """The best placement with routing by predicted ends, where there is a choice. Queues do not have it."""
    changes = {"encoder-routing": Stage.ENCODE, "text-routing": Stage.PREFILL}
    for contender in best[:1]:
        roles = contender.placement.sizes
        change = {
            name: "predicted"
            for name, stage in changes.items()
            if name not in given and sum(count for role, count in roles.items() if role.serves(stage)) > 1
        }
        if change:
            return [_varied(contender, "routing by predicted ends", change)]
    return []


def _varied(contender: Contender, note: str, change: Options) -> Contender:
    """With other settings. Of a contender that varies another itself, it is the same placement."""
    placement = replace(contender.placement, settings={**contender.placement.settings, **change})
    notes = ", ".join(text for text in (contender.note, note) if text)
    origin = contender.varies or contender
    return Contender(placement, contender.usd_per_hour, contender.expected_rps, varies=origin, note=notes)


def _carry_out(findings: Findings, halving: Halving, factory: Factory, note: Note) -> None:
    """Make the runs of a search, until it is over or interrupted."""
    question = findings.question
    deployments: dict[int, Deployment] = {}
    plans: dict[tuple[float, int, int], Plan] = {}
    progress = Progress(1, len(question.rounds), 0, 0)

    def jobs(trials: Iterable[Trial]) -> list[tuple[Trial, Job]]:
        """Those of placements that cannot be simulated are left out."""
        made: list[tuple[Trial, Job]] = []
        for trial in trials:
            contender = trial.contender
            try:
                if id(contender) not in deployments:
                    deployments[id(contender)] = factory.deployment(contender.placement)
            except ValueError as error:
                made += jobs(halving.failed(trial, str(error)))
                continue
            key = trial.rate, trial.seed, trial.requests
            if key not in plans:
                timed = replace(question.workload, duration_s=trial.duration_s)
                plans[key] = timed.plan(trial.rate, trial.seed)
            job = Job(
                deployments[id(contender)], plans[key], trial.fidelity, trial.seed, trial.rate, question.timeout_s
            )
            made.append((trial, job))
            progress.known += 1
        return made

    def following(trial: Trial, outcome: Outcome) -> list[tuple[Trial, Job]]:
        of_trial = counted(outcome, WARM_UP * trial.duration_s)
        records = question.calibration.corrected(trial.contender.placement, of_trial.records)
        after = jobs(halving.took(trial, replace(of_trial, records=records)))
        progress.done += 1
        if after and after[0][0].at + 1 > progress.round:
            progress.round = after[0][0].at + 1
            plans.clear()
            finalists = halving.finalists
            progress.best = str(finalists[0].placement) if finalists else ""
        note(progress)
        return after

    try:
        with closing(side_by_side(jobs(halving.first()), following)) as ending:
            for _ in ending:
                pass
    except KeyboardInterrupt:
        findings.interrupted = True
        if not halving.finalists:
            raise
    except (CannotSimulate, NotSimulated) as error:
        raise CannotSimulate(str(error)) from None


def _rounded(rate: float) -> float:
    """To two digits, so that it can be given again."""
    return float(f"{rate:.2g}")
