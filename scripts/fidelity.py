"""Writes docs/fidelity.md from what ``benchmarks/fidelity.py`` has recorded: ``python -m scripts.fidelity``; with ``--check`` it compares them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.generated import ROOT, run
from scripts.results import RESULTS, joined, shown

PAGE = ROOT / "docs" / "fidelity.md"
FILE = RESULTS / "fidelity-amd-epyc.json"
Json = Mapping[str, Any]

INTRODUCTION = (ROOT / "scripts" / "fidelity.md").read_text()
FIGURES = ("ttft p50", "ttft p90", "ttft p99", "tpot p50", "tpot p90", "tpot p99")


def page() -> str:
    said: Json = json.loads(FILE.read_text())
    parts = [
        INTRODUCTION.rstrip("\n"),
        "## Within the aims",
        "\n".join(summary(said["summary"])),
        "\n".join(drifts(said["drifts"])),
    ]
    for model in said["models"]:
        parts += [f"## {model}", about(model, said)]
        for mix in dict.fromkeys(cell["mix"] for cell in said["cells"] if cell["model"] == model):
            parts += [f"### {model}, {mix}", "\n".join(cells(said["cells"], model, mix))]
    parts += ["## Goodput", "\n".join(goodput(said["goodput"]))]
    parts += ["## Order of placements", "\n".join(orders(said["orders"]))]
    parts += ["## Not run", "; ".join(said["not_run"]) or "None."]
    return "\n\n".join(parts) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> Iterator[str]:
    yield joined(heads)
    yield joined(["-"] * left + ["-:"] * (len(heads) - left))
    for row in rows:
        yield joined([cell if isinstance(cell, str) else shown(cell) for cell in row])


def percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return ""
    return f"{share:+.0%}" if signed else f"{share:.0%}"


def summary(rows: Sequence[Json]) -> Iterator[str]:
    """All cells beside those in which nothing else ran."""
    quiet = {(row["model"], row["figure"]): row for row in rows if row["cells"] == "undisturbed"}
    heads = ("model", "figure", "within", "median error", "worst", "undisturbed: within", "median error", "worst")
    return table(
        heads,
        [
            (row["model"], row["figure"], *of_row(row), *of_row(quiet.get((row["model"], row["figure"]))))
            for row in rows
            if row["cells"] == "all"
        ],
        left=2,
    )


def of_row(row: Json | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    return f"{row['within']} of {row['of']}", percent(row["median"]), percent(row["worst"])


def drifts(rows: Sequence[Json]) -> Iterator[str]:
    yield "The same cell with the same requests again, measured against measured:"
    yield ""
    heads = ("repeated", *FIGURES)
    yield from table(heads, [(row["cell"], *(percent(row[figure], signed=True) for figure in FIGURES)) for row in rows])


def about(model: str, said: Json) -> str:
    known = said["models"][model]
    rates = ", ".join(f"{mix} {shown(rate)}" for mix, rate in known["capacity"].items())
    drift = ", ".join(f"{part} {percent(share, signed=True)}" for part, share in known["drift"].items())
    return f"Capacity, requests per second: {rates}. Drift of the profiles: {drift}."


def cells(all_cells: Sequence[Json], model: str, mix: str) -> Iterator[str]:
    """Errors, with measured and predicted milliseconds; those beyond the aim are bold."""
    rows = []
    for cell in all_cells:
        if (cell["model"], cell["mix"]) != (model, mix):
            continue
        for name in dict.fromkeys(error["class"] for error in cell["errors"]):
            found = {error["figure"]: error for error in cell["errors"] if error["class"] == name}
            where = f"{cell['placement']}, {percent(cell['share'])}" if name == "all" else ""
            rows.append((where, name, *(of_figure(found.get(figure)) for figure in FIGURES), *of_all(cell, name)))
    return table(("placement, load", "class", *FIGURES, "in time", "cores", "by others"), rows, left=2)


def of_figure(error: Json | None) -> str:
    if error is None:
        return ""
    text = percent(error["error"], signed=True)
    text = f"**{text}**" if error["within"] is False else f"({text})" if error["within"] is None else text
    return f"{text}: {shown(float(error['measured_ms']))}, {shown(float(error['predicted_ms']))}"


def of_all(cell: Json, name: str) -> tuple[str, str, str]:
    """Attainment and cores, of the row of all requests."""
    if name != "all":
        return "", "", ""
    in_time, cores = (
        f"{form(values[0])}, {form(values[1])}"
        for form, values in ((percent, cell["attainment"]), (decimals, cell["cores"]))
    )
    return in_time, cores, decimals(cell["foreign_cores"])


def decimals(number: float) -> str:
    return f"{number:.2f}"


def goodput(rows: Sequence[Json]) -> Iterator[str]:
    def of(row: Json) -> tuple[object, ...]:
        reached = row["measured"] == row["highest"]
        more = "at least " if reached else ""
        error = percent(row["error"], signed=True)
        where = (row["model"], row["placement"], row["mix"])
        return (*where, f"{more}{shown(row['measured'])}", row["predicted"], error)

    return table(("model", "placement", "mix", "measured/s", "predicted/s", "error"), [of(row) for row in rows], left=3)


def orders(rows: Sequence[Json]) -> Iterator[str]:
    """How many are right, and each that is wrong."""
    right = sum(row["right"] for row in rows)
    yield f"{right} of {len(rows)} pairs that differ by more than 10 % are in the measured order." + (
        " The others:" if right < len(rows) else ""
    )
    if right < len(rows):
        yield ""
        wrong = [row for row in rows if not row["right"]]
        yield from table(
            ("model, mix, load", "figure", "less", "more", "measured, times", "predicted"),
            [
                (
                    f"{row['model']}, {row['mix']}, {percent(row['share'])}",
                    *(row[key] for key in ("figure", "better", "worse", "measured", "predicted")),
                )
                for row in wrong
            ],
            left=4,
        )


if __name__ == "__main__":
    raise SystemExit(run("scripts.fidelity", __doc__ or "", lambda: {PAGE: page()}))
