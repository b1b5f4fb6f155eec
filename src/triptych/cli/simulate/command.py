"""Simulates a deployment: each rate with each seed, or the search of its goodput; what is shown and written of the runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triptych.cli.bench import show
from triptych.cli.files import make_room
from triptych.cli.outcome import CliError
from triptych.cli.simulate.deployment import Simulated
from triptych.cli.simulate.goodput import GoodputSearch
from triptych.cli.simulate.runs import Case, Ran, run_all
from triptych.errors import TriptychError
from triptych.sim import html, perfetto
from triptych.sim.limits import check
from triptych.sim.outcome import STEPS, Outcome, waterfall
from triptych.sim.prepare import PlannedPrepare, chat_request
from triptych.sim.scenario import Deployment
from triptych.workload.fidelity import Fidelity
from triptych.workload.prices import Prices
from triptych.workload.report import Objectives, Report, goodput, summarize
from triptych.workload.requests import Planned, WorkloadError
from triptych.workload.search import Bracket
from triptych.workload.workload import Workload

_TRIED = 100
"""Requests of a plan that are tried before anything runs."""
INTERRUPTED = "interrupted: these are the figures of what had ended"


@dataclass(frozen=True, slots=True)
class Simulation:
    """Options of a simulation. Of all requests those that come before ``warm_up_s`` are served and not counted."""

    simulated: Simulated
    workload: Workload
    bracket: Bracket | None
    """Where the goodput is looked for, if it is, in place of the workload's rates."""
    seeds: int
    objectives: Objectives
    attainment: float
    timeout_s: float
    warm_up_s: float
    settings: Mapping[str, str]
    """Settings that were asked for, for the report."""
    fidelity: Fidelity = "services"

    @property
    def all_seeds(self) -> Sequence[int]:
        return range(self.workload.seed, self.workload.seed + self.seeds)

    def case(self, rate: float | None, seed: int, *, keeps_spans: bool = False) -> Case:
        """Raises WorkloadError."""
        return Case(self, rate, self.workload.plan(rate, seed), seed, keeps_spans)

    def report(self, outcome: Outcome) -> Report:
        """Of at least one request."""
        return summarize(outcome.records, self.objectives, outcome.rate)

    def search(self) -> GoodputSearch | None:
        """The search of the goodput, if that is wanted. Raises CliError."""
        if self.bracket is None:
            return None
        return GoodputSearch(self.bracket, self.all_seeds, self.objectives, self.attainment, self.warm_up_s)

    def first_cases(self, search: GoodputSearch | None, *, keeps_spans: bool = False) -> list[Case]:
        """Cases that run without knowing of other runs. Raises WorkloadError if a run would be impossible or without a result."""
        if self.bracket is not None and self.workload.asked_rates:
            raise WorkloadError("--goodput looks for the rate: leave out --rate and --sweep")
        rates = self.workload.rates if search is None else (search.first_rate,)
        cases = [self.case(rate, seed, keeps_spans=keeps_spans) for rate in rates for seed in self.all_seeds]
        extreme = [] if self.bracket is None else [self.case(self.bracket.highest, self.workload.seed)]
        _refuse_impossible(self, [*cases, *extreme])
        return cases

    def next_case(self, search: GoodputSearch | None, ran: Ran) -> Case | None:
        """The case that a search tries next after a run. Raises WorkloadError."""
        if search is None:
            return None
        rate = search.ran(ran.case.seed, ran.outcome.rate, self.report(ran.outcome).attainment or 0.0)
        return None if rate is None else self.case(rate, ran.case.seed)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write."""

    json_file: Path | None
    report: Path | None
    trace: Path | None

    @classmethod
    def checked(cls, json_file: Path | None, report: Path | None, trace: Path | None) -> "Outputs":
        """Make their directories, so that errors show before the run. Raises CliError."""
        make_room({"--json": json_file, "--report": report, "--perfetto": trace}, drawn=("--report",))
        return cls(json_file, report, trace)

    def write(self, document: Mapping[str, Any], page: html.Page, traced: Outcome | None = None) -> None:
        """The trace is of ``traced``. Raises CliError."""
        try:
            if self.json_file is not None:
                self.json_file.write_text(json.dumps(document, indent=1) + "\n")
            if self.report is not None:
                self.report.write_text(html.page(page))
            if self.trace is not None and traced is not None:
                perfetto.write(self.trace, traced)
        except OSError as error:
            raise CliError(f"cannot write {error.filename}: {error.strerror}", caller=True) from None


def run(simulation: Simulation, outputs: Outputs, console: Console) -> None:
    """Run everything, show it and write it. Interrupted, it does so with what there is. Raises CliError, WorkloadError."""
    search = simulation.search()
    if search is not None and outputs.trace is not None:
        raise CliError("--perfetto shows one run: leave it out with --goodput", caller=True)
    cases = simulation.first_cases(search, keeps_spans=outputs.trace is not None)
    for note in simulation.simulated.notes:
        console.print(note, soft_wrap=True, style="dim")
    ran, is_whole = run_all(cases, console, lambda run: simulation.next_case(search, run))
    outcomes = [run.outcome for run in ran]
    if outcomes:
        _show(simulation, outcomes, search, console)
        _write(simulation, outcomes, search, outputs, is_whole=is_whole)
    if not is_whole:
        raise KeyboardInterrupt
    if search is not None and search.fault:
        raise CliError(search.fault, caller=True)


def _refuse_impossible(simulation: Simulation, cases: Sequence[Case]) -> None:
    """Raise WorkloadError if no request is counted, or none of the first could be served, and NotSimulated for what that
    fidelity does not have.
    """
    deployment = simulation.simulated.deployment
    for case in cases:
        requests = case.plan.requests
        check(simulation.fidelity, deployment, requests)
        if not any(planned.arrival_s >= simulation.warm_up_s for planned in requests):
            at = "" if case.rate is None else f" at {case.rate:g} requests/s"
            raise WorkloadError(f"--warm-up {simulation.warm_up_s:g}: no request comes after it{at}")
        faults = [_fault_of(deployment, planned) for planned in requests[:_TRIED]]
        if all(faults):
            raise WorkloadError(f"no request can be served: {faults[0]}")


def _fault_of(deployment: Deployment, planned: Planned) -> str:
    """Why a request would be refused; empty if it would not."""
    prepare = PlannedPrepare(deployment.family)
    request = chat_request(0, planned, deployment.model.model_id, timeout_s=1.0)
    prepare.expect(request, 0, planned)
    try:
        prepare(request, deployment.model)
    except TriptychError as error:
        return error.message
    return ""


def _show(simulation: Simulation, outcomes: Sequence[Outcome], search: GoodputSearch | None, console: Console) -> None:
    reports = [simulation.report(outcome) for outcome in outcomes]
    if len(outcomes) == 1:
        [outcome] = outcomes
        console.print(show.run_table(reports[0]))
        table = Table("mean time to the first token", *STEPS, box=None, pad_edge=False, header_style="dim")
        for kind, steps in waterfall(outcome).items():
            table.add_row(kind, *(f"{1000 * steps[step]:.1f} ms" for step in STEPS))
        console.print(table)
        busy = Table("instance", "device", "busy", box=None, pad_edge=False, header_style="dim")
        for use in outcome.instances:
            busy.add_row(
                use.name, use.hardware, ", ".join(f"{work} {part:.0%}" for work, part in use.busy_shares.items())
            )
        console.print(busy)
        for decision in outcome.decisions:
            console.print(f"{decision.at_s:8.1f} s  {decision.text}", soft_wrap=True)
    else:
        console.print(show.sweep_table(reports))
    if search is None and len(simulation.workload.rates) > 1:
        show.print_goodput(reports, simulation.attainment, console)
    for outcome in _chosen(outcomes, search):
        if (prices := prices_of(simulation, outcome, simulation.report(outcome))) is not None:
            console.print(f"price at {outcome.rate:.3g} requests/s: {prices}", soft_wrap=True)
    if (found := None if search is None else search.found()) is not None:
        console.print(str(found), soft_wrap=True)
    print_effort(outcomes, simulation.fidelity, console)


def print_effort(outcomes: Sequence[Outcome], fidelity: str, console: Console) -> None:
    """How the runs came about, and what they took."""
    took_s = sum(outcome.took_s for outcome in outcomes)
    requests = sum(len(outcome.records) for outcome in outcomes)
    console.print(f"{requests} requests simulated by {fidelity} in {took_s:.1f} s of CPU", style="dim")


def _chosen(outcomes: Sequence[Outcome], search: GoodputSearch | None) -> Sequence[Outcome]:
    """The runs to be shown in full: after a search those at the rates that it found."""
    if search is None:
        return outcomes
    if (found := search.found()) is None:
        return []
    return [outcome for outcome in outcomes if found.by_seed[outcome.seed] == outcome.rate]


def prices_of(simulation: Simulation, outcome: Outcome, report: Report) -> Prices | None:
    """None where a device has no price, or nothing was answered."""
    hours, prices = outcome.device_hours(), simulation.simulated.prices
    if not hours or not hours.keys() <= prices.keys():
        return None
    lasted_s = max(outcome.ended_s, 1e-9)
    per_hour = sum(spent * prices[device] for device, spent in hours.items()) * 3600 / lasted_s
    tokens = report.output_tokens + report.prompt_tokens
    return Prices.of(per_hour, lasted_s - simulation.warm_up_s, report.answered, tokens)


def _write(
    simulation: Simulation,
    outcomes: Sequence[Outcome],
    search: GoodputSearch | None,
    outputs: Outputs,
    *,
    is_whole: bool,
) -> None:
    """Raises CliError."""
    page = html.Page(
        f"Simulation of {simulation.simulated.deployment.model.model_id}",
        simulation.settings,
        (f"simulated by {simulation.fidelity}", *simulation.simulated.notes, *(() if is_whole else (INTERRUPTED,))),
        simulation.objectives,
        simulation.simulated.prices,
        () if search is None else (search.finding,),
        outcomes,
        in_full=_chosen(outcomes, search),
    )
    document = document_of(simulation, outcomes, search, is_whole=is_whole)
    outputs.write(document, page, outcomes[0])


def document_of(
    simulation: Simulation, outcomes: Sequence[Outcome], search: GoodputSearch | None, *, is_whole: bool
) -> dict[str, Any]:
    """All results as JSON."""
    reports = [simulation.report(outcome) for outcome in outcomes]
    found = None if search is None else search.found()
    rate = goodput(reports, simulation.attainment) if search is None else found and found.interval.mean
    return {
        "mode": simulation.fidelity,
        "costs": list(simulation.simulated.notes),
        "settings": dict(simulation.settings),
        "objectives": asdict(simulation.objectives) | {"attainment": simulation.attainment},
        "interrupted": not is_whole,
        "goodput_rps": rate,
        "goodput": None if found is None else found.document(),
        "no_goodput": "" if search is None else search.fault,
        "runs": [
            {
                "rate": outcome.rate,
                "seed": outcome.seed,
                "took_s": outcome.took_s,
                "report": report.document(),
                "waterfall_s": waterfall(outcome),
                "instances": [asdict(use) for use in outcome.instances],
                "device_hours": dict(outcome.device_hours()),
                "moved_bytes": dict(outcome.moved_bytes),
                "decisions": [asdict(decision) for decision in outcome.decisions],
                "samples": [asdict(sample) for sample in outcome.samples],
                "requests": [
                    {
                        "arrival_s": round(record.planned.arrival_s, 6),
                        "kind": record.planned.kind,
                        "ttft_s": record.ttft_s,
                        "tpot_s": record.tpot_s,
                        "e2e_s": record.end_s,
                        "prompt_tokens": record.prompt_tokens,
                        "tokens": record.tokens,
                        "error": record.error,
                    }
                    for record in outcome.records
                ],
            }
            for outcome, report in zip(outcomes, reports, strict=True)
        ],
    }
