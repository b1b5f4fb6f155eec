"""From what a search has found to a plan: the order of the candidates, what each lacks, and what more devices would bring."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf

from triptych.runtime.plans import (
    Budget,
    Candidate,
    Figures,
    Goodput,
    Infeasible,
    KindFigures,
    Made,
    Options,
    Placement,
    PlanRecord,
    Predicted,
    Rejected,
    ShadowPrice,
    Win,
)
from triptych.workload.prices import Prices
from triptych.workload.report import KindReport, Objectives, Record
from triptych.workload.requests import KINDS

from .closed_form import Point, roomy
from .combination import METHODS
from .planner import Findings, placement_of
from .search import Contender, Result
from .shortlist import cheapest
from .space import MOST_INSTANCES, Bounds, combinations, points

SIMPLER = 0.05
"""A placement must be better by more than this share to be chosen before a simpler one."""
_STEP_S = 0.001
"""Relaxed objectives are multiples of this."""


def conclude(
    findings: Findings, *, model: str, model_id: str, common: Options, workload: Options, made: Made
) -> PlanRecord:
    """The plan, also of a search that was interrupted, and of one that has found nothing.

    The other arguments are fields of the plan that the search does not know; ``workload`` is without the rate.
    """
    question, halving = findings.question, findings.halving
    ranked = [] if halving is None else halving.finalists
    given_up = [] if halving is None else halving.rejected
    plan = PlanRecord(
        model=model,
        model_id=model_id,
        common=common,
        workload={"rate": f"{findings.budget.rate:g}", **workload},
        objectives=question.objectives,
        attainment=question.attainment,
        budget=findings.budget,
        candidates=(),
        winners={},
        front=(),
        why=(),
        rejected=(
            *(Rejected(contender.placement, reason) for contender, reason in given_up),
            *_passed_over(findings),
        ),
        shadow_prices=(),
        infeasible=None,
        made=made,
        mix=findings.wanted.demand.mix.forms,
    )
    if not ranked:
        return replace(plan, infeasible=_infeasible(findings, ()))
    why: list[str] = []
    ranked = _simplest_first(ranked, findings, why)
    judged = [_judged(contender, findings) for contender in ranked]
    best = judged[0]
    candidates = tuple(
        candidate if candidate is best else _with_lacks(candidate, best, findings) for candidate in judged
    )
    winners = _winners(candidates)
    if best.meets:
        untried = [f"{mode} was not tried: {reason}" for mode, reason in findings.untried.items()]
        why = [*_why(candidates, winners, findings), *why, *untried]
    return replace(
        plan,
        candidates=candidates,
        winners=winners,
        front=_front(candidates),
        why=tuple(why),
        shadow_prices=tuple(_shadow_prices(findings.point(ranked[0]), findings.budget)),
        infeasible=None if best.meets else _infeasible(findings, list(zip(ranked, candidates, strict=True))),
    )


# --- order ------------------------------------------------------------------------------------------------------------


def _simplest_first(ranked: Sequence[Contender], findings: Findings, why: list[str]) -> list[Contender]:
    """Within a margin of the best, the whole model on each instance is chosen, and settings as they are."""
    halving = findings.halving
    assert halving is not None  # noqa: S101 - there are contenders
    best = ranked[0]
    monoliths = [contender for contender in ranked if contender.is_monolith and contender.varies is None]
    plain = [origin for origin in reversed(best.origins) if origin in ranked]
    for simpler in (*monoliths, *plain):
        if simpler is best or halving.meets(simpler) < halving.meets(best):
            continue
        if (worse := _worse(simpler, best, findings)) <= SIMPLER:
            why.append(
                f"{best.placement}{f' ({best.note})' if best.note else ''} is better by {max(0.0, worse):.1%}, which is "
                f"within {SIMPLER:.0%}: this one is simpler"
            )
            return [simpler, *(contender for contender in ranked if contender is not simpler)]
    return list(ranked)


def _worse(contender: Contender, best: Contender, findings: Findings) -> float:
    """By which share it is worse than the best in what is preferred."""
    own, of_best = contender.result, best.result
    assert own is not None  # noqa: S101 - both are ranked
    assert of_best is not None  # noqa: S101
    match findings.question.prefers:
        case "goodput":
            return 1 - own.goodput_rps / of_best.goodput_rps if of_best.goodput_rps else 0.0
        case "ttft":
            return own.ttft_s(0.9) / of_best.ttft_s(0.9) - 1
        case "cheapest":
            return _cost(contender.placement, contender.usd_per_hour) / _cost(best.placement, best.usd_per_hour) - 1


def _cost(placement: Placement, usd_per_hour: float | None) -> float:
    return usd_per_hour or float(sum(placement.device_counts.values()))


def _winners(candidates: Sequence[Candidate]) -> dict[Win, int]:
    """Of equal ones the first; prices are compared in cents."""
    winners: dict[Win, int] = {}
    numbers = range(len(candidates))
    goodputs = [_goodput(candidate) for candidate in candidates]
    if any(goodputs):
        winners["goodput"] = max(numbers, key=lambda number: goodputs[number])
    if meeting := [number for number in numbers if candidates[number].meets]:
        winners["cheapest"] = min(meeting, key=lambda number: round(_price(candidates[number]), 2))
        winners["ttft"] = min(meeting, key=lambda number: _ttft(candidates[number]))
    return winners


def _front(candidates: Sequence[Candidate]) -> tuple[int, ...]:
    """Candidates of which no other is at least as good in price, goodput and TTFT, and better in one."""
    keys = [(_price(each), -_goodput(each), _ttft(each)) for each in candidates]

    def is_beaten(own: tuple[float, ...]) -> bool:
        return any(
            other != own and all(better <= mine for better, mine in zip(other, own, strict=True)) for other in keys
        )

    return tuple(number for number, key in enumerate(keys) if not is_beaten(key))


def _price(candidate: Candidate) -> float:
    prices = candidate.predicted.prices
    return _cost(candidate.placement, None if prices is None else prices.usd_per_hour)


def _goodput(candidate: Candidate) -> float:
    return 0.0 if candidate.predicted.goodput is None else candidate.predicted.goodput.rps


def _ttft(candidate: Candidate) -> float:
    p90_s = candidate.predicted.figures.all.ttft.p90_s
    return inf if p90_s is None else p90_s


# --- figures ----------------------------------------------------------------------------------------------------------


def _judged(contender: Contender, findings: Findings) -> Candidate:
    halving, result, rate = findings.halving, contender.result, findings.budget.rate
    assert halving is not None  # noqa: S101 - there are contenders
    assert result is not None  # noqa: S101 - it is ranked
    records, objectives = result.records, findings.question.objectives
    kinds = {record.planned.kind for record in records}
    figures = Figures(
        rate,
        _kind(records, objectives),
        {
            kind: _kind([record for record in records if record.planned.kind == kind], objectives)
            for kind in KINDS
            if kind in kinds
        },
    )
    goodputs = sorted(result.goodputs.values())
    judged = findings.point(contender).judge(rate)
    predicted = Predicted(
        figures=figures,
        goodput=Goodput(result.goodput_rps, goodputs[0], goodputs[-1], result.is_bound),
        headroom={share: sum(values) / len(values) for share, values in result.headroom.items()},
        utilization=judged.utilization,
        binds=judged.binds,
        prices=_prices(contender, records, rate),
        fidelity=result.round.fidelity,
        seeds=len(result.seeds),
    )
    return Candidate(contender.placement, predicted, halving.meets(contender), note=contender.note)


def _kind(records: Sequence[Record], objectives: Objectives) -> KindFigures:
    report = KindReport.of(records, objectives)
    return KindFigures(report.requests, report.answered, report.ttft, report.tpot, report.attainment)


def _prices(contender: Contender, records: Sequence[Record], rate: float) -> Prices | None:
    if contender.usd_per_hour is None:
        return None
    answered = [record for record in records if record.ok]
    tokens = sum(record.prompt_tokens + record.tokens for record in answered)
    return Prices.of(contender.usd_per_hour, len(records) / rate, len(answered), tokens)


# --- words ------------------------------------------------------------------------------------------------------------


def _why(candidates: Sequence[Candidate], winners: Mapping[Win, int], findings: Findings) -> Iterator[str]:
    best, rate = candidates[0], findings.budget.rate
    what = {
        "cheapest": f"it is the cheapest that serves {rate:.3g} requests/s within the objectives",
        "goodput": "it has the highest goodput of what the budget allows",
        "ttft": f"it has the shortest time to the first token (P90) at {rate:.3g} requests/s",
    }
    held = [text for win, text in what.items() if winners.get(win) == 0]  # type: ignore[call-overload]  # of all names
    yield from held
    share = best.predicted.utilization.get(best.predicted.binds, 0.0)
    yield f"{best.predicted.binds} is its busiest stage: it takes {share:.0%} of its instances' time in full batches"


def _with_lacks(candidate: Candidate, best: Candidate, findings: Findings) -> Candidate:
    """Beside the chosen one."""
    lacks = []
    objectives, predicted = findings.question.objectives, candidate.predicted
    if not candidate.meets:
        share = predicted.figures.all.attainment or 0.0
        lacks.append(f"{share:.0%} of the requests get {objectives}; {predicted.binds} is busiest")
    if (dearer := _price(candidate) / max(_price(best), 1e-9) - 1) > 0.005:
        lacks.append(f"{dearer:.0%} dearer")
    if (lower := 1 - _goodput(candidate) / max(_goodput(best), 1e-9)) > 0.005:
        lacks.append(f"{lower:.0%} less goodput: {predicted.binds} is busiest")
    if best.meets and candidate.meets and (longer := _ttft(candidate) / max(_ttft(best), 1e-9) - 1) > 0.02:
        lacks.append(f"first tokens take {longer:.0%} longer (P90)")
    text = "; ".join(lacks) or "nothing that is preferred: it is less simple, or as good"
    return Candidate(candidate.placement, predicted, candidate.meets, text, candidate.note)


def _passed_over(findings: Findings) -> Iterator[Rejected]:
    for scored, reason in findings.shortlist.passed_over:
        yield Rejected(placement_of(scored.point), reason)


# --- more devices -----------------------------------------------------------------------------------------------------


def _shadow_prices(point: Point, budget: Budget) -> Iterator[ShadowPrice]:
    """What one more instance of a role brings for each device that it takes, of each kind of device that there is."""
    before = point.goodput()
    for device in budget.devices:
        best: ShadowPrice | None = None
        for at, (role, pool) in enumerate(zip(point.method.roles, point.pools, strict=True)):
            offer = pool.instance.offer
            if offer.device != device or pool.count >= MOST_INSTANCES:
                continue
            more = tuple(count + (number == at) for number, count in enumerate(point.counts))
            gained = max(0.0, (Point(point.combination, more).goodput() - before) / offer.degree)
            price = None if offer.usd_per_hour is None else offer.usd_per_hour / offer.degree
            if best is None or gained > best.goodput_rps:
                best = ShadowPrice(device, role, gained, price)
        if best is not None:
            yield best


# --- infeasible -------------------------------------------------------------------------------------------------------


def _infeasible(findings: Findings, judged: Sequence[tuple[Contender, Candidate]]) -> Infeasible:
    """``judged``: what was simulated, best first."""
    reasons = tuple(_alone(findings))
    relaxed: Objectives | None = None
    larger: Point | None = None
    if judged:
        contender, candidate = max(judged, key=lambda pair: pair[1].predicted.figures.all.attainment or 0.0)
        predicted = candidate.predicted
        if not reasons:
            taken = predicted.utilization.get(predicted.binds, 0.0)
            share = predicted.figures.all.attainment or 0.0
            text = (
                f"at {findings.budget.rate:.3g} requests/s at most {share:.0%} of the requests get "
                f"{findings.question.objectives} ({candidate.placement}): {predicted.binds} takes {taken:.0%} of its instances' time"
            )
            reasons = (text,)
        if contender.result is not None:
            relaxed = _relaxed(contender.result, findings)
    if not reasons:
        text = (
            f"nothing within the budget serves {findings.question.rate or 0.0:.3g} requests/s so that "
            f"{findings.question.attainment:.0%} get {findings.question.objectives}"
        )
        reasons = (text,)
    if findings.question.rate is not None:
        larger = _larger(findings)
    return Infeasible(
        reasons,
        relaxed,
        None if larger is None else placement_of(larger),
        None if larger is None else larger.usd_per_hour,
    )


def _alone(findings: Findings) -> Iterator[str]:
    """Objectives that requests of a kind miss even without others, on the fastest instances that there are."""
    objectives, needs = findings.question.objectives, findings.wanted.demand.needs
    methods = [method for method in METHODS if method.shared is None]
    tried = [roomy(combination) for combination in combinations(findings.offers, findings.wanted, methods)]
    if not tried:
        return
    alone = [(point, point.alone_s()) for point in tried]
    for kind in KINDS:
        numbers = [number for number, need in enumerate(needs) if need.kind == kind]
        missed: dict[str, str] = {}
        for number in numbers:
            steps = [(point, by_need[number]) for point, by_need in alone]
            point, fastest = min(steps, key=lambda pair: _first_s(pair[1]))
            if objectives.ttft_s is not None and _first_s(fastest) > objectives.ttft_s:
                stage = max((name for name in fastest if name != "decode"), key=lambda name: fastest[name])
                missed["TTFT"] = (
                    f"a TTFT of at most {1000 * objectives.ttft_s:g} ms: {kind} requests take up to "
                    f"{1000 * _first_s(fastest):.0f} ms alone, {1000 * fastest[stage]:.0f} ms of them to {_verb(stage)} "
                    f"({placement_of(point)})"
                )
            point, fastest = min(steps, key=lambda pair: pair[1]["decode"])
            if objectives.tpot_s is not None and fastest["decode"] > objectives.tpot_s:
                missed["TPOT"] = (
                    f"a TPOT of at most {1000 * objectives.tpot_s:g} ms: a decode step of one {kind} request takes "
                    f"{1000 * fastest['decode']:.1f} ms alone ({placement_of(point)})"
                )
        yield from missed.values()


def _first_s(steps: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in steps.items() if name != "decode")


def _verb(stage: str) -> str:
    return {"transfer": "pull embeddings"}.get(stage, stage)


def _larger(findings: Findings) -> Point | None:
    """The cheapest that serves the rate, of the same kinds of devices without limits, with one role for each stage."""
    rate = findings.question.rate or 0.0
    unbounded = Budget(dict.fromkeys(findings.budget.devices), None, rate)
    methods = [method for method in METHODS if method.shared is None]
    return cheapest(points(findings.offers, Bounds(unbounded, rate), findings.wanted, methods), rate)


def _relaxed(result: Result, findings: Findings) -> Objectives | None:
    """Objectives that as many requests of a run meet as are wanted."""
    objectives, attainment = findings.question.objectives, findings.question.attainment
    share = 1 - (1 - attainment) / 2 if None not in (objectives.ttft_s, objectives.tpot_s) else attainment
    ttft_s, tpot_s = result.ttft_s(min(share, 0.999)), result.tpot_s(min(share, 0.999))
    if inf in (ttft_s, tpot_s):
        return None
    return Objectives(
        None if objectives.ttft_s is None else max(objectives.ttft_s, _up(ttft_s)),
        None if objectives.tpot_s is None else max(objectives.tpot_s, _up(tpot_s)),
    )


def _up(seconds: float) -> float:
    return ceil(seconds / _STEP_S) * _STEP_S
