"""Writes the tables of docs/fidelity.md, below its introduction, from what ``benchmarks/fidelity.py`` has recorded: ``python -m scripts.fidelity``;
with ``--check`` it compares them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.fidelity_report import BOTH, CHOICE_AIM, UNDISTURBED, summary
from scripts.generated import ROOT, run
from scripts.results import RESULTS, joined, shown

PAGE = ROOT / "docs" / "fidelity.md"
FILES = ("fidelity-vllm-amd-epyc", "fidelity-50m-amd-epyc", "fidelity-demo-amd-epyc")
"""The records, the oldest first. Each model and mix is shown as the newest record with it has it."""
Json = Mapping[str, Any]

MARK = "<!-- From here on written by scripts/fidelity.py from benchmarks/results; `make lint` compares. -->"
FAR_APART = 1.5
"""Times as much, from which on each pair in the wrong order is shown."""
FIGURES = ("ttft p50", "ttft p90", "ttft p99", "tpot p50", "tpot p90", "tpot p99")


def page() -> str:
    records = newest([json.loads((RESULTS / f"{name}.json").read_text()) for name in FILES])
    every = {
        key: [row for record in records for row in record[key]]
        for key in ("cells", "goodput", "choices", "orders", "drifts")
    }
    introduction, mark, _ = PAGE.read_text().partition(MARK)
    parts = [
        introduction + mark,
        "## Within the aims",
        "\n".join(within(every)),
        "\n".join(drifts(every["drifts"])),
    ]
    for model in dict.fromkeys(name for record in records for name in record["models"]):
        parts += [f"## {model}", "\n".join(about(model, records))]
        for mix in dict.fromkeys(cell["mix"] for cell in every["cells"] if cell["model"] == model):
            parts += [f"### {model}, {mix}", "\n".join(cells(every["cells"], model, mix))]
    parts += ["## Goodput", "\n".join(goodput(every["goodput"]))]
    parts += ["## Chosen placements", "\n".join(choices(every["choices"]))]
    parts += ["## Order of placements", "\n".join(orders(every["orders"]))]
    parts += ["## Not run", not_run(records) or "None."]
    return "\n\n".join(parts) + "\n"


def newest(records: Sequence[Json]) -> list[Json]:
    """The records without what a later one has of the same model and mix."""
    found: list[Json] = []
    later: set[tuple[str, str]] = set()
    for record in reversed(records):
        shown_here = {(cell["model"], cell["mix"]) for cell in record["cells"]} - later
        later |= shown_here
        rows = {
            key: [row for row in record.get(key, ()) if (row["model"], row["mix"]) in shown_here]
            for key in ("cells", "goodput", "choices", "orders")
        }
        named = {
            key: [row for row in record[key] if _place(row["cell"] if key == "drifts" else row) in shown_here]
            for key in ("drifts", "not_run")
        }
        models = {
            model: known
            | {"capacity": {mix: rate for mix, rate in known["capacity"].items() if (model, mix) in shown_here}}
            for model, known in record["models"].items()
            if any(model == name for name, _ in shown_here)
        }
        found.insert(0, {**rows, **named, "models": models})
    return found


def _place(cell: str) -> tuple[str, str]:
    """Model and mix of a cell's name."""
    model, _, mix, _ = cell.split(", ")
    return model, mix


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> Iterator[str]:
    yield joined(heads)
    yield joined(["-"] * left + ["-:"] * (len(heads) - left))
    for row in rows:
        yield joined([cell if isinstance(cell, str) else shown(cell) for cell in row])


def percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return ""
    return f"{share:+.0%}" if signed else f"{share:.0%}"


def within(every: Json) -> Iterator[str]:
    """By model and mix: how many are within the aim, and the median error."""
    rows = summary(every)
    figures = (*FIGURES, "goodput", "order", "choice")

    def of(place: tuple[str, str]) -> Iterator[str]:
        found = {row["figure"]: row for row in rows if (row["model"], row["mix"]) == place}
        for row in map(found.get, figures):
            error = "" if row is None or row["median"] is None else f": {percent(row['median'])}"
            yield "" if row is None else f"{row['within']} of {row['of']}{error}"

    places = dict.fromkeys((row["model"], row["mix"]) for row in rows)
    yield "Figures within their aims, and the median error:"
    yield ""
    yield from table(("model", "mix", *figures), [(*place, *of(place)) for place in places], left=2)
    disturbed = sum(cell["foreign_cores"] >= UNDISTURBED for cell in every["cells"])
    yield ""
    yield f"In {disturbed} of {len(every['cells'])} cells other work took {UNDISTURBED} cores or more."


def drifts(rows: Sequence[Json]) -> Iterator[str]:
    yield "The same cell with the same requests again, measured against measured:"
    yield ""
    heads = ("repeated", *FIGURES)
    yield from table(heads, [(row["cell"], *(percent(row[figure], signed=True) for figure in FIGURES)) for row in rows])


def about(model: str, records: Sequence[Json]) -> Iterator[str]:
    for record in records:
        if (known := record["models"].get(model)) is not None:
            rates = ", ".join(f"{mix} {shown(rate)}" for mix, rate in known["capacity"].items())
            drift = ", ".join(f"{part} {percent(share, signed=True)}" for part, share in known["drift"].items())
            yield f"Capacity, requests per second: {rates}. Drift of the profiles: {drift}."


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
    return f"{text}: {shown(float(error['measured_ms']))}/{shown(float(error['predicted_ms']))}"


def of_all(cell: Json, name: str) -> tuple[str, str, str]:
    """Attainment and cores, of the row of all requests."""
    if name != "all":
        return "", "", ""
    in_time, cores = (
        f"{form(values[0])}/{form(values[1])}"
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
        where = (row["model"], row["placement"], row["mix"], row.get("objectives", BOTH))
        return (*where, f"{more}{shown(row['measured'])}", row["predicted"], error)

    heads = ("model", "placement", "mix", "objectives", "measured/s", "predicted/s", "error")
    return table(heads, [of(row) for row in rows], left=4)


def choices(rows: Sequence[Json]) -> Iterator[str]:
    """What is chosen by the predicted goodput, beside the best."""
    right = sum(row["right"] for row in rows)
    yield f"In {right} of {len(rows)} cases the chosen placement has the highest goodput measured, or lacks at most {percent(CHOICE_AIM)} of it."
    yield ""
    heads = ("model", "mix", "objectives", "chosen", "best", "lacks")
    places = [(row["model"], row["mix"], row["objectives"], row["chosen"], row["best"]) for row in rows]
    lacks = [percent(row["lacks"]) for row in rows]
    yield from table(heads, [(*place, lack) for place, lack in zip(places, lacks, strict=True)], left=5)


def orders(rows: Sequence[Json]) -> Iterator[str]:
    """How many are right, and each pair far apart that is wrong."""
    far = [row for row in rows if row["measured"] > FAR_APART]
    for some, apart in ((rows, "10 %"), (far, f"{FAR_APART} times")):
        right = sum(row["right"] for row in some)
        yield f"{right} of {len(some)} pairs that differ by more than {apart} are in the measured order."
    wrong: dict[str, list[str]] = {}
    for row in far:
        if not row["right"]:
            times = f"{shown(row['measured'])}, {shown(row['predicted'])}"
            pair = f"{row['figure']}, {row['worse']} / {row['better']}: {times}"
            wrong.setdefault(f"{row['model']}, {row['mix']}, {percent(row['share'])}", []).append(pair)
    if wrong:
        yield "The others of the latter, with how many times as much the first has, measured and predicted:"
        yield ""
        pairs = [(place, "; ".join(found)) for place, found in wrong.items()]
        yield from table(("model, mix, load", "pairs"), pairs, left=2)


def not_run(records: Sequence[Json]) -> str:
    """By model, mix and load, the placements that no record has."""
    ran = {
        f"{cell['model']}, {cell['placement']}, {cell['mix']}, {percent(cell['share'])}"
        for record in records
        for cell in record["cells"]
    }
    missing: dict[str, list[str]] = {}
    for cell in sorted({cell for record in records for cell in record["not_run"]} - ran):
        model, placement, mix, share = cell.split(", ")
        missing.setdefault(f"{model}, {mix}, {share}", []).append(placement)
    return "; ".join(f"{place}: {', '.join(placements)}" for place, placements in missing.items())


if __name__ == "__main__":
    raise SystemExit(run("scripts.fidelity", __doc__ or "", lambda: {PAGE: page()}))
