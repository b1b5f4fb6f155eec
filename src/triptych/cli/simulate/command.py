"""Runs simulations: each rate with each seed, side by side, and what is shown and written of them."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from triptych.cli.bench import show
from triptych.cli.outcome import CliError
from triptych.cli.simulate.deployment import Simulated
from triptych.errors import TriptychError
from triptych.runtime.cores import usable_cores
from triptych.runtime.process import CannotStart
from triptych.sim import html, perfetto
from triptych.sim.machines.limits import check
from triptych.sim.machines.run import simulate as simulate_machines
from triptych.sim.outcome import STEPS, Outcome, waterfall
from triptych.sim.prepare import PlannedPrepare, chat_request
from triptych.sim.run import Simulate, simulate
from triptych.sim.scenario import Deployment
from triptych.virtual.virtual_time import VirtualTimeError
from triptych.workload.report import Objectives, Report, summarize
from triptych.workload.requests import Plan, Planned, WorkloadError
from triptych.workload.workload import Workload

Fidelity = Literal["services", "machines"]
"""How results come about: the real services run in virtual time, or their machines are driven without them."""
SIMULATORS: Mapping[Fidelity, Simulate] = {"services": simulate, "machines": simulate_machines}
_TRIED = 100
"""Requests of a plan that are tried before anything runs."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """Options of a simulation. Of all requests those that come before ``warm_up_s`` are served and not counted."""

    simulated: Simulated
    workload: Workload
    seeds: int
    objectives: Objectives
    attainment: float
    timeout_s: float
    warm_up_s: float
    settings: Mapping[str, str]
    """What was asked for, for the report."""
    fidelity: Fidelity = "services"


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write."""

    json_file: Path | None
    report: Path | None
    trace: Path | None

    @classmethod
    def checked(cls, json_file: Path | None, report: Path | None, trace: Path | None) -> "Outputs":
        """Make their directories, so that errors show before the run. Raises CliError."""
        from importlib.util import find_spec

        if report is not None and find_spec("matplotlib") is None:
            raise CliError("--report needs matplotlib: install Triptych's extra 'bench'", caller=True)
        given = [path for path in (json_file, report, trace) if path is not None]
        if len({path.absolute() for path in given}) < len(given):
            raise CliError("--json, --report and --perfetto name one file", caller=True)
        for path in (json_file, report, trace):
            if path is not None:
                try:
                    path.absolute().parent.mkdir(parents=True, exist_ok=True)
                    path.open("a").close()
                except OSError as error:
                    raise CliError(f"cannot write {path}: {error.strerror}", caller=True) from None
        return cls(json_file, report, trace)


@dataclass(frozen=True, slots=True)
class _Case:
    simulation: Simulation
    rate: float | None
    """What was asked for; None for a trace's own."""
    plan: Plan
    seed: int
    keeps_spans: bool


def run(simulation: Simulation, outputs: Outputs, console: Console) -> None:
    """Run everything, show it and write it. Interrupted, it does so with the runs that have ended. Raises CliError, WorkloadError, NotByMachines."""
    workload = simulation.workload
    cases = [
        _Case(
            simulation,
            rate,
            workload.plan(rate, workload.seed + number),
            workload.seed + number,
            outputs.trace is not None,
        )
        for rate in workload.rates
        for number in range(simulation.seeds)
    ]
    _refuse_impossible(simulation, cases)
    for note in simulation.simulated.notes:
        console.print(note, soft_wrap=True, style="dim")
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        outcomes.extend(_outcomes(cases, console))  # keeps what there is when it is interrupted
    except KeyboardInterrupt:
        interrupted = True
        console.print(f"interrupted: {len(outcomes)} of {len(cases)} runs had ended")
    outcomes = [_counted(simulation, outcome) for outcome in outcomes]
    outcomes.sort(key=lambda outcome: (outcome.rate, outcome.seed))
    if outcomes:
        _show(simulation, outcomes, console)
        _write(simulation, outcomes, outputs)
    if interrupted:
        raise KeyboardInterrupt


def _outcomes(cases: Sequence[_Case], console: Console) -> Iterator[Outcome]:
    total = sum(len(case.plan.requests) for case in cases)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=total)
        if len(cases) == 1:
            [case] = cases
            yield _simulated(case, lambda: bar.advance(task))
            return
        workers = min(len(cases), len(usable_cores()))
        with ProcessPoolExecutor(workers, get_context("spawn"), _ignore_interrupts) as pool:
            futures = {pool.submit(_simulated, case): case for case in cases}
            try:
                for future in as_completed(futures):
                    yield future.result()
                    bar.advance(task, len(futures[future].plan.requests))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _ignore_interrupts() -> None:
    """Ctrl-C goes to the whole group; the parent ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _simulated(case: _Case, advance: Callable[[], None] | None = None) -> Outcome:
    """One run, in its own process or in this one. Raises CliError for a cluster that does not get ready."""
    simulation = case.simulation
    try:
        outcome = SIMULATORS[simulation.fidelity](
            simulation.simulated.deployment,
            case.plan,
            seed=case.seed,
            timeout_s=simulation.timeout_s,
            keeps_spans=case.keeps_spans,
            note=(lambda _: None) if advance is None else (lambda _: advance()),
        )
    except (CannotStart, TimeoutError, VirtualTimeError, OSError) as error:
        raise CliError(
            f"the cluster cannot be simulated: {error or 'it does not get ready in time'}", caller=True
        ) from None
    return replace(outcome, rate=case.plan.rate if case.rate is None else case.rate)


def _counted(simulation: Simulation, outcome: Outcome) -> Outcome:
    """Only the requests after the warm-up, whose end is the beginning then."""
    numbers = [at for at, record in enumerate(outcome.records) if record.planned.arrival_s >= simulation.warm_up_s]
    records = [outcome.records[at] for at in numbers]
    return replace(
        outcome,
        records=[
            replace(record, planned=replace(record.planned, arrival_s=record.planned.arrival_s - simulation.warm_up_s))
            for record in records
        ],
        timelines=[outcome.timelines[at] for at in numbers],
    )


def _refuse_impossible(simulation: Simulation, cases: Sequence[_Case]) -> None:
    """Raise WorkloadError if no request is counted, or none of the first could be served, and NotByMachines for what that fidelity does not have."""
    deployment = simulation.simulated.deployment
    if simulation.fidelity == "machines":
        check(deployment)
    for case in cases:
        requests = case.plan.requests
        if not any(planned.arrival_s >= simulation.warm_up_s for planned in requests):
            raise WorkloadError(f"--warm-up {simulation.warm_up_s:g}: no request comes after it")
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


def _report(simulation: Simulation, outcome: Outcome) -> Report:
    return summarize(outcome.records, simulation.objectives, outcome.rate)


def _show(simulation: Simulation, outcomes: Sequence[Outcome], console: Console) -> None:
    if len(outcomes) == 1:
        [outcome] = outcomes
        console.print(show.run_table(_report(simulation, outcome)))
        table = Table("mean time to the first token", *STEPS, box=None, pad_edge=False, header_style="dim")
        for kind, steps in waterfall(outcome).items():
            table.add_row(kind, *(f"{1000 * steps[step]:.1f} ms" for step in STEPS))
        console.print(table)
        busy = Table("instance", "device", "busy", box=None, pad_edge=False, header_style="dim")
        for use in outcome.instances:
            shares = (f"{work} {spent_s / max(use.lasted_s, 1e-9):.0%}" for work, spent_s in use.busy_s.items())
            busy.add_row(
                use.name, use.device if use.devices == 1 else f"{use.devices} x {use.device}", ", ".join(shares)
            )
        console.print(busy)
        for decision in outcome.decisions:
            console.print(f"{decision.at_s:8.1f} s  {decision.text}", soft_wrap=True)
    else:
        console.print(show.sweep_table([_report(simulation, outcome) for outcome in outcomes]))
    if (best := goodput(simulation, outcomes)) is not None and len(simulation.workload.rates) > 1:
        console.print(
            f"goodput {best:.3g} requests/s (the highest rate with at least {simulation.attainment:.0%} attainment on average)"
        )
    for outcome in outcomes:
        if price := _price(simulation, outcome):
            console.print(f"price at {outcome.rate:.3g} requests/s: {price}", soft_wrap=True)
    took_s = sum(outcome.took_s for outcome in outcomes)
    requests = sum(len(outcome.records) for outcome in outcomes)
    console.print(f"{requests} requests simulated by {simulation.fidelity} in {took_s:.1f} s of CPU", style="dim")


def goodput(simulation: Simulation, outcomes: Sequence[Outcome]) -> float | None:
    """The highest rate at which the runs of all seeds together meet the objectives; None without objectives."""
    if not simulation.objectives.any:
        return None
    shares: dict[float, list[float]] = {}
    for outcome in outcomes:
        shares.setdefault(outcome.rate, []).append(_report(simulation, outcome).attainment or 0.0)
    met = [rate for rate, of_rate in shares.items() if sum(of_rate) / len(of_rate) >= simulation.attainment]
    return max(met, default=0.0)


def _price(simulation: Simulation, outcome: Outcome) -> str:
    """What the devices of a run cost; empty where one has no price, or nothing was answered."""
    hours, prices = outcome.device_hours(), simulation.simulated.prices
    report = _report(simulation, outcome)
    if not hours or not hours.keys() <= prices.keys() or not report.answered:
        return ""
    lasted_s = max(outcome.ended_s, 1e-9)
    per_hour = sum(spent * prices[device] for device, spent in hours.items()) * 3600 / lasted_s
    dollars = per_hour * (lasted_s - simulation.warm_up_s) / 3600
    return (
        f"${per_hour:.2f} per hour, ${1000 * dollars / report.answered:.2f} per thousand requests, "
        f"${1e6 * dollars / (report.output_tokens + report.prompt_tokens):.2f} per million tokens"
    )


def _write(simulation: Simulation, outcomes: Sequence[Outcome], outputs: Outputs) -> None:
    """Raises CliError."""
    try:
        if outputs.json_file is not None:
            outputs.json_file.write_text(json.dumps(_document(simulation, outcomes), indent=1) + "\n")
        if outputs.report is not None:
            page = html.Page(
                f"Simulation of {simulation.simulated.deployment.model.model_id}",
                simulation.settings,
                (f"simulated by {simulation.fidelity}", *simulation.simulated.notes),
                simulation.objectives,
                simulation.simulated.prices,
            )
            outputs.report.write_text(html.page(page, outcomes))
        if outputs.trace is not None:
            perfetto.write(outputs.trace, outcomes[0])
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", caller=True) from None


def _document(simulation: Simulation, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "mode": simulation.fidelity,
        "costs": list(simulation.simulated.notes),
        "settings": dict(simulation.settings),
        "objectives": asdict(simulation.objectives) | {"attainment": simulation.attainment},
        "goodput_rps": goodput(simulation, outcomes),
        "runs": [
            {
                "rate": outcome.rate,
                "seed": outcome.seed,
                "took_s": outcome.took_s,
                "report": _report(simulation, outcome).document(),
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
            for outcome in outcomes
        ],
    }
