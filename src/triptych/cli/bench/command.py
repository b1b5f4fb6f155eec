"""Runs one benchmark: plan, send, report."""

import asyncio
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from triptych.cli.bench import load, show
from triptych.cli.bench.load import Endpoint
from triptych.cli.bench.payload import Style
from triptych.cli.files import make_room
from triptych.cli.outcome import CliError
from triptych.workload.report import Objectives, Record, Run, goodput, summarize
from triptych.workload.requests import Plan
from triptych.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Bench:
    """Options of a benchmark."""

    endpoint: Endpoint
    model: str | None
    workload: Workload
    ignore_eos: bool
    objectives: Objectives
    attainment: float


@dataclass(frozen=True, slots=True)
class Outputs:
    """Output files, written at the end."""

    json_file: Path | None
    plot: Path | None

    @classmethod
    def checked(cls, json_file: Path | None, plot: Path | None) -> Self:
        """Create the directories, so that errors show before the run. Raises CliError."""
        if plot is not None and plot.suffix.lower() != ".png":
            raise CliError(f"--plot {plot}: plots are PNG files; name one that ends in .png", caller=True)
        make_room({"--json": json_file, "--plot": plot}, drawn=("--plot",))
        return cls(json_file, plot)

    def write(self, job: Bench, runs: Sequence[Run]) -> None:
        """Raises CliError."""
        try:
            if self.json_file is not None:
                write_json(self.json_file, job, runs)
            if self.plot is not None:
                show.plot(self.plot, runs, job.objectives)
        except OSError as error:
            raise CliError(f"cannot write {error.filename}: {error.strerror}", caller=True) from None


async def bench_and_write(job: Bench, outputs: Outputs, console: Console) -> bool:
    """Run and write the outputs. Return whether requests were answered, and none failed. Raises CliError.

    When interrupted, the tables and files show the requests that have ended.
    """
    runs: list[Run] = []
    try:
        await bench(job, console, runs)
    except asyncio.CancelledError:
        if runs:
            outputs.write(job, runs)
        raise
    outputs.write(job, runs)
    return any(run.report.answered for run in runs) and not any(run.report.failed for run in runs)


async def bench(job: Bench, console: Console, runs: list[Run]) -> None:
    """Run every rate, appending to ``runs``. Raises WorkloadError, EndpointError, RestError."""
    plans = [(rate, job.workload.plan(rate)) for rate in job.workload.rates]
    model = await load.model_to_ask(job.endpoint, job.model)
    try:
        for rate, plan in plans:
            asked = "the trace's own rate" if rate is None else f"{rate:g}/s asked for"
            number = len(plan.requests)
            console.print(f"{model}: {number} requests in {plan.duration_s:g} s, {plan.rate:.3g}/s ({asked})")
            await _run(job, rate, plan, Style(model, job.ignore_eos), console, runs)
    finally:
        _show(job, console, runs, of=len(plans))


async def _run(job: Bench, rate: float | None, plan: Plan, style: Style, console: Console, runs: list[Run]) -> None:
    # Rates share their requests, but not what is in them: the endpoint's caches would know it from the run before.
    rng = random.Random(f"{job.workload.seed} {rate} bodies")  # noqa: S311
    records: list[Record] = []
    try:
        with _progress(console, len(plan.requests)) as advance:

            def note(record: Record) -> None:
                records.append(record)
                advance(record)

            await load.run(job.endpoint, plan.requests, style, rng, note)
    except asyncio.CancelledError:
        console.print(f"interrupted: {len(records)} of {len(plan.requests)} requests had ended")
        raise
    finally:
        if records:
            runs.append(Run(rate, summarize(records, job.objectives, plan.rate), records))


def _show(job: Bench, console: Console, runs: Sequence[Run], *, of: int) -> None:
    reports = [run.report for run in runs]
    if of == 1:
        for report in reports:
            console.print(show.run_table(report))
    elif reports:
        console.print(show.sweep_table(reports))
        show.print_goodput(reports, job.attainment, console)
    for report in reports:
        if (warning := show.not_kept_up(report)) is not None:
            console.print(warning, soft_wrap=True)


class _progress:  # noqa: N801 - used as a statement
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("ended", total=total)
        self._failed = 0

    def __enter__(self) -> Callable[[Record], None]:
        self._bar.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _advance(self, record: Record) -> None:
        self._failed += not record.ok
        self._bar.update(
            self._task, advance=1, description=f"ended ({self._failed} failed)" if self._failed else "ended"
        )


def write_json(path: Path, job: Bench, runs: Sequence[Run]) -> None:
    """Write options, reports, and one entry per request, but no API keys. Raises OSError."""
    document = {
        "workload": {
            "trace": job.workload.trace.name if job.workload.trace else None,
            "start_s": job.workload.start_s,
            "duration_s": job.workload.duration_s if job.workload.duration_s < math.inf else None,
            "burstiness": job.workload.burstiness,
            "seed": job.workload.seed,
            "ignore_eos": job.ignore_eos,
        },
        "objectives": {"ttft_s": job.objectives.ttft_s, "tpot_s": job.objectives.tpot_s, "attainment": job.attainment},
        "goodput_rps": goodput([run.report for run in runs], job.attainment),
        "runs": [
            {
                "asked_rate": run.asked_rate,
                "report": run.report.document(),
                "requests": [_entry(record) for record in run.records],
            }
            for run in runs
        ],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _entry(record: Record) -> dict[str, object]:
    return {
        "arrival_s": round(record.planned.arrival_s, 6),
        "images": len(record.planned.images),
        "videos": len(record.planned.videos),
        "sounds": len(record.planned.sounds_s),
        "sent_late_s": round(record.sent_late_s, 6),
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "e2e_s": record.end_s,
        "prompt_tokens": record.prompt_tokens,
        "tokens": record.tokens,
        "error": record.error,
    }
