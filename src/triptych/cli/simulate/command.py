"""Runs simulations: each rate with each seed, side by side, and what is shown and written of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from triptych.cli.bench import show
from triptych.cli.outcome import CliError
from triptych.cli.simulate.deployment import Simulated
from triptych.runtime.cores import usable_cores
from triptych.sim import html, perfetto
from triptych.sim.outcome import STEPS, Outcome, waterfall
from triptych.sim.run import simulate
from triptych.workload.report import Objectives, Report, summarize
from triptych.workload.requests import Plan
from triptych.workload.workload import Workload

MODE = "services"
"""How a result came about: the real services ran in virtual time."""


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
    plan: Plan
    seed: int
    keeps_spans: bool


def run(simulation: Simulation, outputs: Outputs, console: Console) -> None:
    """Run everything, show it and write it. Interrupted, it does so with the runs that have ended. Raises CliError, WorkloadError."""
    workload = simulation.workload
    cases = [
        _Case(
            simulation, workload.plan(rate, workload.seed + number), workload.seed + number, outputs.trace is not None
        )
        for rate in workload.rates
        for number in range(simulation.seeds)
    ]
    for note in simulation.simulated.notes:
        console.print(note, soft_wrap=True, style="dim")
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        outcomes.extend(_outcomes(cases, console))  # keeps what there is when it is interrupted
    except KeyboardInterrupt:
        interrupted = True
        console.print(f"interrupted: {len(outcomes)} of {len(cases)} runs had ended")
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
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(_simulated, case): case for case in cases}
            try:
                for future in as_completed(futures):
                    yield future.result()
                    bar.advance(task, len(futures[future].plan.requests))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _simulated(case: _Case, advance: Any = None) -> Outcome:
    """One run, in its own process or in this one."""
    simulation = case.simulation
    outcome = simulate(
        simulation.simulated.deployment,
        case.plan,
        seed=case.seed,
        timeout_s=simulation.timeout_s,
        keeps_spans=case.keeps_spans,
        note=(lambda _: None) if advance is None else (lambda _: advance()),
    )
    counted = [
        number for number, record in enumerate(outcome.records) if record.planned.arrival_s >= simulation.warm_up_s
    ]
    return replace(
        outcome,
        records=[outcome.records[number] for number in counted],
        timelines=[outcome.timelines[number] for number in counted],
    )


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
    for name, cost in _cost(simulation, outcomes).items():
        console.print(f"{name} {cost}", soft_wrap=True)
    took_s = sum(outcome.took_s for outcome in outcomes)
    requests = sum(len(outcome.records) for outcome in outcomes)
    console.print(f"{requests} requests simulated by {MODE} in {took_s:.1f} s of CPU", style="dim")


def goodput(simulation: Simulation, outcomes: Sequence[Outcome]) -> float | None:
    """The highest rate at which the runs of all seeds together meet the objectives; None without objectives."""
    if not simulation.objectives.any:
        return None
    best = 0.0
    for rate in {outcome.rate for outcome in outcomes} if simulation.seeds == 1 else _asked(simulation):
        runs = _of_rate(simulation, outcomes, rate)
        shares = [share for run in runs if (share := _report(simulation, run).attainment) is not None]
        if shares and sum(shares) / len(shares) >= simulation.attainment:
            best = max(best, rate)
    return best


def _asked(simulation: Simulation) -> Sequence[float]:
    return [rate for rate in simulation.workload.rates if rate is not None]


def _of_rate(simulation: Simulation, outcomes: Sequence[Outcome], rate: float) -> Sequence[Outcome]:
    """The runs at this rate: exactly, or with several seeds those whose asked rate is the nearest."""
    if simulation.seeds == 1:
        return [outcome for outcome in outcomes if outcome.rate == rate]
    asked = _asked(simulation)
    return [outcome for outcome in outcomes if min(asked, key=lambda known: abs(known - outcome.rate)) == rate]


def _cost(simulation: Simulation, outcomes: Sequence[Outcome]) -> Mapping[str, str]:
    """What the devices of the first run cost, where all have a price."""
    outcome, prices = outcomes[0], simulation.simulated.prices
    hours = outcome.device_hours()
    if not hours or not hours.keys() <= prices.keys():
        return {}
    dollars = sum(spent * prices[device] for device, spent in hours.items())
    report = _report(simulation, outcome)
    span_h = max(outcome.ended_s, 1e-9) / 3600
    return {
        "price": f"${dollars / span_h:.2f} per hour, ${1000 * dollars / max(1, report.answered):.2f} per thousand requests, "
        f"${1e6 * dollars / max(1, report.output_tokens + report.prompt_tokens):.2f} per million tokens"
    }


def _write(simulation: Simulation, outcomes: Sequence[Outcome], outputs: Outputs) -> None:
    """Raises CliError."""
    try:
        if outputs.json_file is not None:
            outputs.json_file.write_text(json.dumps(_document(simulation, outcomes), indent=1) + "\n")
        if outputs.report is not None:
            page = html.Page(
                f"Simulation of {simulation.simulated.deployment.model.model_id}",
                simulation.settings,
                (f"simulated by {MODE}", *simulation.simulated.notes),
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
        "mode": MODE,
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
