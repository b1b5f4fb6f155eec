"""Holds a plan against a running cluster: offers its workload, and shows what was predicted beside what was measured."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triptych.cli.bench import command
from triptych.cli.bench.load import Endpoint
from triptych.cli.outcome import CliError
from triptych.cli.plan.apply import candidate_of, read_plan
from triptych.cli.plan.reading import load_of
from triptych.cli.profile.first_use import cache_directory
from triptych.cli.show import plain_console
from triptych.planning.calibration import FILE_NAME, Figure, Verified, add, beside, factors_of, kinds_of, times_of
from triptych.runtime.plans import Candidate, KindFigures, PlanRecord
from triptych.workload.report import PERCENTILES, Latency, Report, Run

USUAL_ERROR = 0.3
"""Error that is expected where a plan does not say it."""
_NOISE_S = 0.001
"""Difference of two times that says nothing."""
_LEAST_BEYOND = 2
"""Requests above a quantile from which on it is judged."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Options of ``triptych plan verify``. ``model`` is the name under which it is served, if not the plan's."""

    plan: Path
    endpoint: Endpoint
    model: str | None
    candidate: int | None
    duration_s: float | None
    error: float | None
    calibration: Path | None


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of the requests of one kind, or of all: predicted and measured."""

    kind: str
    figure: str
    predicted: float | None
    measured: float | None
    is_judged: bool
    expected_error: float

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to what was measured; None if one is not there."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1

    @property
    def is_within(self) -> bool:
        """Whether it is not judged, or right."""
        if not self.is_judged or self.predicted is None or self.measured is None:
            return True
        difference = abs(self.predicted - self.measured)
        return difference <= max(_NOISE_S, self.expected_error * self.measured)

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error, "is_within": self.is_within}


@dataclass(frozen=True, slots=True)
class Result:
    """The comparison of a plan's candidate with a cluster."""

    rows: Sequence[Compared]
    report: Report
    attainment: float
    """Share of requests that must meet the objectives."""
    predicted_attainment: float | None
    expected_error: float

    @property
    def keeps_promise(self) -> bool:
        """Whether the objectives were met, if there are some, and no request failed."""
        met = self.report.attainment is None or self.report.attainment >= self.attainment
        return met and self.report.answered > 0 and not self.report.failed

    @property
    def passed(self) -> bool:
        return self.keeps_promise and self.report.kept_up and all(row.is_within for row in self.rows)

    def document(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "keeps_promise": self.keeps_promise,
            "expected_error": self.expected_error,
            "attainment": {
                "predicted": self.predicted_attainment,
                "measured": self.report.attainment,
                "wanted": self.attainment,
            },
            "figures": [row.document() for row in self.rows],
            "report": self.report.document(),
        }


async def verify(verification: Verification, console: Console, *, as_json: bool) -> bool:
    """Offer the load, show the comparison, and keep what was measured. Returns whether it passed. Raises CliError, WorkloadError."""
    plan = read_plan(verification.plan)
    candidate = candidate_of(plan, verification.candidate)
    run = await _measured(verification, plan, plain_console(stderr=True) if as_json else console)
    error = verification.error or plan.made.expected_error or USUAL_ERROR
    result = Result(
        tuple(_compared(candidate, run.report, error)),
        run.report,
        plan.attainment,
        candidate.predicted.figures.all.attainment,
        error,
    )
    kept = _kept(verification, plan, candidate, result)
    if as_json:
        print(json.dumps(result.document() | {"calibration": str(kept)}, indent=1))
        return result.passed
    _show(result, console)
    console.print(f"kept for the next plan in {kept}", soft_wrap=True, style="dim")
    return result.passed


async def _measured(verification: Verification, plan: PlanRecord, console: Console) -> Run:
    load = load_of(plan)
    workload = load.workload
    if len(workload.rates) != 1:
        raise CliError("the plan's workload has several rates: it is verified at one", caller=True)
    if verification.duration_s is not None:
        workload = replace(workload, duration_s=verification.duration_s)
    endpoint = replace(verification.endpoint, timeout_s=load.timeout_s)
    job = command.Bench(endpoint, verification.model, workload, True, plan.objectives, plan.attainment)
    runs: list[Run] = []
    await command.bench(job, console, runs)
    return runs[0]


def _compared(candidate: Candidate, report: Report, error: float) -> Iterator[Compared]:
    predicted = candidate.predicted.figures
    yield from _of_kind("all", predicted.all, report.ttft, report.tpot, report.answered, error)
    for kind, measured in report.by_kind.items():
        if (figures := predicted.by_kind.get(kind)) is not None:
            yield from _of_kind(kind, figures, measured.ttft, measured.tpot, measured.answered, error)


def _of_kind(
    kind: str, predicted: KindFigures, ttft: Latency, tpot: Latency, answered: int, error: float
) -> Iterator[Compared]:
    for name, expected, measured in (("TTFT", predicted.ttft, ttft), ("TPOT", predicted.tpot, tpot)):
        for percentile in PERCENTILES:
            judged = answered * (100 - percentile) >= 100 * _LEAST_BEYOND
            field, figure = f"p{percentile}_s", f"{name} P{percentile}"
            yield Compared(kind, figure, getattr(expected, field), getattr(measured, field), judged, error)


def _kept(verification: Verification, plan: PlanRecord, candidate: Candidate, result: Result) -> Path:
    """The file to which the verification was added. Raises CliError."""
    profiles = plan.common.get("profiles")
    usual = cache_directory() / FILE_NAME if profiles is None else beside(Path(profiles))
    path = verification.calibration or usual
    judged = {row.figure.replace(" ", "_").lower() for row in result.rows if row.kind == "all" and row.is_judged}
    figures, report = candidate.predicted.figures, result.report
    factors = factors_of(times_of(figures.all.ttft, figures.all.tpot), times_of(report.ttft, report.tpot))
    known: Mapping[Figure, float] = {figure: factor for figure, factor in factors.items() if figure in judged}
    entry = Verified(
        datetime.now(UTC).isoformat(timespec="seconds"),
        plan.model_id,
        kinds_of(candidate.placement),
        str(candidate.placement),
        report.rate,
        report.answered,
        known,
        result.passed,
    )
    try:
        add(path, entry)
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", caller=True) from None
    return path


def _show(result: Result, console: Console) -> None:
    table = Table(
        "requests", "figure", "predicted", "measured", "error", "", box=None, pad_edge=False, header_style="dim"
    )
    for row in result.rows:
        verdict = ("within" if row.is_within else "beyond") if row.is_judged else "too few requests"
        error = "-" if row.error is None else f"{row.error:+.0%}"
        table.add_row(row.kind, row.figure, _ms(row.predicted), _ms(row.measured), error, verdict)
    console.print(table)
    report, predicted = result.report, result.predicted_attainment
    if report.attainment is not None:
        said = "-" if predicted is None else f"{predicted:.1%}"
        console.print(
            f"attainment: predicted {said}, measured {report.attainment:.1%}, wanted {result.attainment:.0%}",
            soft_wrap=True,
        )
    beyond = [f"{row.figure} ({row.kind})" for row in result.rows if not row.is_within]
    if result.passed:
        console.print(f"passed: all figures that are judged are within {result.expected_error:.0%}", soft_wrap=True)
        return
    reasons = [f"beyond {result.expected_error:.0%}: {', '.join(beyond)}"] if beyond else []
    reasons += [] if result.keeps_promise else ["the cluster does not meet the objectives, or requests failed"]
    reasons += [] if report.kept_up else ["the load was not offered as planned"]
    console.print(f"failed: {'; '.join(reasons)}", soft_wrap=True)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
