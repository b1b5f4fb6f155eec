"""The report of a simulation: one HTML file without network, scripts and fonts. Its curves need matplotlib."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, get_args

from triptych.workload.report import KindReport, Objectives, summarize

from .outcome import STEPS, Busy, Outcome, waterfall

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1c2733; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; margin: .5rem 0 } td, th { padding: .2rem .8rem .2rem 0; text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left } th { border-bottom: 1px solid #c8d1da; font-weight: 600 }
td.text { text-align: left } .note { color: #5a6875 } svg { max-width: 100%; height: auto }
"""


@dataclass(frozen=True, slots=True)
class Page:
    """The report's page, with what it says beside its runs."""

    title: str
    settings: Mapping[str, str]
    """Of the scenario, by name."""
    notes: Sequence[str]
    """Sources of costs, and warnings."""
    objectives: Objectives
    prices: Mapping[str, float]
    """Per hour of a device, by its name, in dollars."""
    findings: Sequence[str]
    """Findings from all runs together."""
    runs: Sequence[Outcome]
    """Runs of which the page shows the figures."""
    compared: "Grid | None" = None
    in_full: Sequence[Outcome] = ()
    """Runs with a part of their own."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table with a note below it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def page(what: Page) -> str:
    """The whole document. Raises ImportError without matplotlib."""
    parts = [f"<h1>{escape(what.title)}</h1>"]
    parts += [f'<p class="note">{escape(note)}</p>' for note in what.notes]
    parts += [f"<p>{escape(finding)}</p>" for finding in what.findings if finding]
    if what.compared is not None:
        parts += [table(what.compared.header, what.compared.rows), f'<p class="note">{escape(what.compared.note)}</p>']
    if len(what.runs) > 1:
        parts += ["<h2>Runs</h2>", _runs(what, what.runs), figure(_sweep, what, what.runs)]
    for run in what.in_full:
        parts += _run(what, run, title=len(what.runs) > 1)
    parts += ["<h2>Scenario</h2>", table(("setting", ""), what.settings.items())]
    return document(what.title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A whole document of parts of its body."""
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>{body}</body></html>\n'


def _runs(what: Page, runs: Sequence[Outcome]) -> str:
    rows = []
    for run in runs:
        report = summarize(run.records, what.objectives, run.rate)
        rows.append(
            (
                f"{run.rate:.3g}",
                str(run.seed),
                str(report.requests),
                str(report.requests - report.answered),
                _ms(report.ttft.p50_s),
                _ms(report.ttft.p99_s),
                _ms(report.tpot.p50_s),
                _ms(report.tpot.p99_s),
                _percent(report.attainment),
            )
        )
    header = ("requests/s", "seed", "requests", "failed", "TTFT P50", "P99", "TPOT P50", "P99", "attainment")
    return table(header, rows)


def _run(what: Page, run: Outcome, *, title: bool) -> Iterable[str]:
    if title:
        yield f"<h2>{run.rate:.3g} requests/s, seed {run.seed}</h2>"
    report = summarize(run.records, what.objectives, run.rate)
    latencies: dict[str, KindReport] = {"all": KindReport.of(run.records, what.objectives)}
    latencies |= {str(kind): part for kind, part in report.by_kind.items()}
    rows = []
    for kind, part in latencies.items():
        for name, latency in (("TTFT", part.ttft), ("TPOT", part.tpot), ("end to end", part.e2e)):
            values = (latency.mean_s, latency.p50_s, latency.p90_s, latency.p99_s)
            share = _percent(part.attainment) if name == "TTFT" else ""
            rows.append((f"{kind}: {name}", *map(_ms, values), share))
    yield table(("", "mean", "P50", "P90", "P99", "attainment"), rows)
    if report.errors:
        yield table(("errors", ""), [(name, str(count)) for name, count in report.errors.items()])
    yield "<h3>Where the time to the first token goes</h3>"
    steps = waterfall(run)
    yield table(("kind", *STEPS), [(kind, *(_ms(means[step]) for step in STEPS)) for kind, means in steps.items()])
    yield figure(_waterfall, steps)
    yield "<h3>Over time</h3>"
    yield figure(_over_time, run)
    if run.decisions:
        yield "<h3>Sizes, switches and faults</h3>"
        yield table(("at", "what"), [(f"{decision.at_s:.1f} s", decision.text) for decision in run.decisions])
    yield "<h3>Instances</h3>"
    yield table(
        ("instance", "role", "device", "hours", *get_args(Busy)),
        [
            (
                use.name,
                use.role,
                use.hardware,
                f"{use.lasted_s / 3600:.3f}",
                *(_percent(use.busy_shares.get(work, 0.0)) for work in get_args(Busy)),
            )
            for use in run.instances
        ],
    )
    hours = run.device_hours()
    rows = [
        (device, f"{spent:.3f}", f"${spent * what.prices[device]:.2f}" if device in what.prices else "no price")
        for device, spent in hours.items()
    ]
    yield table(("device", "hours", "price"), rows)
    if run.moved_bytes:
        moved = [(link, f"{nbytes / 1e9:.3f} GB") for link, nbytes in sorted(run.moved_bytes.items())]
        yield table(("link", "moved"), moved)


def figure(draw: Any, *args: Any) -> str:
    """A figure as SVG, drawn on by ``draw``."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure, *args)
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "triptych", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _sweep(figure: Any, what: Page, runs: Sequence[Outcome]) -> None:
    axes = figure.subplots(1, 3)
    points = sorted(
        ((run.rate, summarize(run.records, what.objectives, run.rate)) for run in runs), key=lambda point: point[0]
    )
    rates = [rate for rate, _ in points]
    for axis, name in zip(axes[:2], ("ttft", "tpot"), strict=True):
        for quantile in ("p50_s", "p99_s"):
            values = [getattr(getattr(report, name), quantile) for _, report in points]
            axis.plot(
                rates, [float("nan") if value is None else 1000 * value for value in values], "o-", label=quantile[:3]
            )
        axis.set(title=name.upper(), xlabel="requests/s", ylabel="ms")
        axis.legend()
    shares = [
        report.answered / report.requests if report.attainment is None else report.attainment for _, report in points
    ]
    axes[2].plot(rates, shares, "o-")
    axes[2].set(title="attainment" if what.objectives.any else "answered", xlabel="requests/s", ylim=(0, 1.02))


def _waterfall(figure: Any, steps: Mapping[str, Mapping[str, float]]) -> None:
    axis = figure.subplots()
    kinds = list(steps)
    left = [0.0] * len(kinds)
    for step in STEPS:
        widths = [1000 * steps[kind][step] for kind in kinds]
        axis.barh(kinds, widths, left=left, label=step)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axis.set(xlabel="ms to the first token, mean")
    axis.legend(ncols=len(STEPS), loc="upper center", bbox_to_anchor=(0.5, 1.2), frameon=False)


def _over_time(figure: Any, run: Outcome) -> None:
    axes = figure.subplots(1, 3)
    times = [sample.at_s for sample in run.samples]
    charts: tuple[tuple[str, list[Mapping[str, float]]], ...] = (
        ("busy", [{str(work): share for work, share in sample.busy.items()} for sample in run.samples]),
        ("items and requests at a stage", [sample.pending for sample in run.samples]),
        ("instances", [sample.sizes for sample in run.samples]),
    )
    for axis, (title, series) in zip(axes, charts, strict=True):
        for name in dict.fromkeys(name for sample in series for name in sample):
            axis.step(times, [sample.get(name, 0) for sample in series], where="post", label=name)
        axis.set(title=title, xlabel="s")
        axis.set_ylim(bottom=0)
        if times:
            axis.legend()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text. With two columns the second is text too, else all but the first are figures."""
    cells = [f"<th>{escape(name)}</th>" for name in header]
    lines = [f"<tr>{''.join(cells)}</tr>"]
    for row in rows:
        wide = ' class="text"' if len(header) == 2 else ""
        first, *others = map(escape, row)
        lines.append(f"<tr><td>{first}</td>{''.join(f'<td{wide}>{cell}</td>' for cell in others)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
