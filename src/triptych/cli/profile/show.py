"""Profiles as text and as plots."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from triptych.domain.profile import TABLES, Profile
from triptych.policy.interpolation import table_rows

_SHOWN = ("encode", "prepare", "prefill", "decode", "transfer", "load", "errors")


def summary(profile: Profile) -> str:
    """Line on what was measured, on what, for how long."""
    identity, measured = profile.identity, profile.measured
    rows = sum(len(getattr(profile, name)) for name in TABLES if name != "errors")
    return (
        f"{identity.part.value} {identity.digest[:12]} on {identity.hardware}, {identity.dtype.value}, {measured.weights_nbytes / 2**20:.3g} MiB "
        f"of weights: {rows} rows in {measured.took_s:.0f} s; starts in {measured.start_s:.1f} s"
    )


def tables(profile: Profile) -> Iterator[Table]:
    """Tables of a profile, one per measured table. Times are in milliseconds."""
    for name in _SHOWN:
        rows = sorted(
            getattr(profile, name), key=lambda row: [str(cell) if not _is_number(cell) else cell for cell in row]
        )
        if not rows:
            continue
        table = Table(title=name, title_justify="left")
        for column in TABLES[name].__annotations__:
            table.add_column(_heading(column))
        for row in rows:
            table.add_row(
                *(_cell(column, value) for column, value in zip(TABLES[name].__annotations__, row, strict=True))
            )
        yield table


def search_result(report: Mapping[str, Any], factor: float) -> str:
    """The largest load and batch within the objectives."""
    objectives = ", ".join(f"{stage} {1000 * seconds:.3g} ms" for stage, seconds in report["objectives"].items())
    if not report["tokens_per_s"]:
        return f"no measured load meets the objectives (P99: {objectives}; {factor:g} times the latency without load)"
    return (
        f"up to {report['tokens_per_s']:.4g} tokens/s with batches of up to {report['max_batch']} within the objectives "
        f"(P99: {objectives}; {factor:g} times the latency without load)"
    )


def plot(path: Path, profile: Profile) -> None:
    """Draw a plot per table, with a line per value of its second axis. Raises OSError."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    drawn = table_rows(profile)
    figure, axes = plt.subplots(1, max(1, len(drawn)), figsize=(5 * max(1, len(drawn)), 4), squeeze=False)
    labels = {
        "encode": ("tokens per item", "items"),
        "prepare": ("pixels", "bytes per pixel"),
        "prefill": ("new tokens", "cached tokens"),
        "decode": ("context (tokens)", "sequences"),
    }
    for axis, (name, rows) in zip(axes[0], drawn.items(), strict=False):
        x_label, line_label = labels[name]
        for y in sorted({row[1] for row in rows}):
            points = sorted((row[0], 1000 * row[2]) for row in rows if row[1] == y)
            axis.plot([x for x, _ in points], [value for _, value in points], marker="o", label=f"{y:.3g}")
        axis.set(title=name, xlabel=x_label, ylabel="ms", xscale="log", yscale="log")
        axis.legend(title=line_label, fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _heading(column: str) -> str:
    if not _is_time(column):
        return column
    if column == "seconds":
        return "time (ms)"
    return f"{column.removesuffix('_s2')} (ms2)" if column.endswith("_s2") else f"{column.removesuffix('_s')} (ms)"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_time(column: str) -> bool:
    return column == "seconds" or (column.endswith(("_s", "_s2")) and not column.endswith("_per_s"))


def _cell(column: str, value: Any) -> str:
    if _is_time(column):
        return f"{value * (1e6 if column.endswith('_s2') else 1000):.3g}"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(getattr(value, "value", value))
