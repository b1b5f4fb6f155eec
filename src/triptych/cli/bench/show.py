"""Reports as tables and plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triptych.workload.report import NOT_SENT, Latency, Objectives, Record, Report, Run, goodput


def run_table(report: Report) -> Table:
    """Table of one run in full."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    for _ in range(4):
        table.add_column(justify="right")
    table.add_row("offered", f"{rate_of(report)} req/s", "", "", "")
    table.add_row("requests", str(report.requests), f"{report.answered} answered", f"{report.duration_s:.1f} s", "")
    for error, count in report.errors.items():
        table.add_row("", str(count), error, "", "")
    table.add_row("throughput", f"{report.requests_per_s:.2f} req/s", f"{report.output_tokens_per_s:.1f} tok/s", "", "")
    table.add_row(
        "tokens", f"{report.prompt_tokens:,} in", f"{report.output_tokens:,} out", f"{report.images} images", ""
    )
    table.add_row("", "mean", "p50", "p90", "p99")
    for name, latency in (("TTFT", report.ttft), ("TPOT", report.tpot), ("end to end", report.e2e)):
        table.add_row(name, *_latencies(latency))
    for kind, part in report.by_kind.items():
        table.add_row(f"{kind}: TTFT", *_latencies(part.ttft))
    if report.sent_late_p99_s > 0.05:
        table.add_row("sent late", "", "", "", _ms(report.sent_late_p99_s))
    if report.attainment is not None:
        table.add_row("attainment", f"{report.attainment:.1%}", "", "", "")
        for kind, part in report.by_kind.items():
            table.add_row("", f"{part.attainment:.1%}", f"{kind}, {part.requests} requests", "", "")
    return table


def rate_of(report: Report) -> str:
    """The offered rate, with a mark where the generator did not keep up."""
    return f"{report.rate:.3g}{'' if report.kept_up else '*'}"


def not_kept_up(report: Report) -> str | None:
    """A warning for a run whose load differed from the plan."""
    if report.kept_up:
        return None
    unsent = report.errors.get(NOT_SENT, 0)
    return (
        f"* the generator did not keep up with {report.rate:.3g} requests/s: "
        f"{f'{unsent} requests were not sent, ' if unsent else ''}"
        f"1 in 100 was sent more than {report.sent_late_p99_s:.2f} s late; latencies count from when they were due"
    )


def sweep_table(reports: Sequence[Report]) -> Table:
    """Table with a line per rate."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    columns = ("req/s", "sent", "errors", "answered/s", "TTFT p50", "p99", "TPOT p50", "p99", "attainment")
    for name in columns:
        table.add_column(name, justify="right")
    for report in reports:
        table.add_row(
            rate_of(report),
            str(report.requests),
            str(report.requests - report.answered),
            f"{report.requests_per_s:.2f}",
            *(_ms(value) for value in (report.ttft.p50_s, report.ttft.p99_s, report.tpot.p50_s, report.tpot.p99_s)),
            "-" if report.attainment is None else f"{report.attainment:.1%}",
        )
    return table


def print_goodput(reports: Sequence[Report], attainment: float, console: Console) -> None:
    """The goodput of a sweep with what it is; nothing without objectives."""
    best = goodput(reports, attainment)
    if best is not None:
        console.print(
            f"goodput {best:.3g} requests/s (the highest offered rate with at least {attainment:.0%} attainment on average)"
        )


def plot(path: Path, runs: Sequence[Run], objectives: Objectives) -> None:
    """Write a PNG: for one run the distribution of its latencies, for a sweep latencies and attainment by rate.

    Raises ImportError without matplotlib, OSError when the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    if len(runs) == 1:
        _distributions(axes, runs[0].records, objectives)
    else:
        _by_rate(axes, [run.report for run in runs])
    if any(not run.report.kept_up for run in runs):
        figure.suptitle("the generator did not keep up: " + ", ".join(rate_of(run.report) for run in runs))
    figure.savefig(path, dpi=120, format="png")


def _distributions(axes: Any, records: Sequence[Record], objectives: Objectives) -> None:
    good = [record for record in records if record.ok]
    series = (
        ("TTFT", [record.ttft_s for record in good if record.ttft_s is not None], objectives.ttft_s),
        ("TPOT", [record.tpot_s for record in good if record.tpot_s is not None], objectives.tpot_s),
        ("end to end", [record.end_s for record in good], None),
    )
    for axis, (name, values, objective_s) in zip(axes, series, strict=True):
        ordered = sorted(value * 1000 for value in values)
        axis.step(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], where="post")
        if objective_s is not None:
            axis.axvline(objective_s * 1000, color="tab:red", linestyle="--", label="objective")
            axis.legend()
        axis.set(title=name, xlabel="ms", ylabel="share of answers", ylim=(0, 1.02))


def _by_rate(axes: Any, reports: Sequence[Report]) -> None:
    reports = sorted(reports, key=lambda report: report.rate)
    rates = [report.rate for report in reports]
    latencies = {"TTFT": [report.ttft for report in reports], "TPOT": [report.tpot for report in reports]}
    for axis, (name, series) in zip(axes[:2], latencies.items(), strict=True):
        for quantile in ("p50_s", "p99_s"):
            values = [getattr(latency, quantile) for latency in series]
            points = [float("nan") if value is None else value * 1000 for value in values]
            axis.plot(rates, points, marker="o", label=quantile[:3])
        axis.set(title=name, xlabel="requests/s", ylabel="ms")
        axis.legend()
    shares = [
        report.answered / report.requests if report.attainment is None else report.attainment for report in reports
    ]
    axes[2].plot(rates, shares, marker="o")
    judged = all(report.attainment is not None for report in reports)
    axes[2].set(title="attainment" if judged else "answered", xlabel="requests/s", ylim=(0, 1.02))


def _latencies(latency: Latency) -> list[str]:
    return [_ms(value) for value in (latency.mean_s, latency.p50_s, latency.p90_s, latency.p99_s)]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
