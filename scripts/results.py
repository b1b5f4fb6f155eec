"""Writes benchmarks/results/README.md from the files beside it: ``python -m scripts.results``; with ``--check`` it compares them.

sections.toml says what is shown of which file. A file without a section is an error.
"""

import ast
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.generated import ROOT, run

RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "README.md"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Columns of a list of rows; sections.toml explains the fields."""

    rows: str
    labels: Mapping[str, str]
    figures: Mapping[str, str]
    across: Sequence[str] = ()
    where: Mapping[str, object] = field(default_factory=dict)
    summed: bool = False
    within: Mapping[str, float] = field(default_factory=dict)


INTRODUCTION = """Main figures of each recorded run. `python -m benchmarks.NAME ARGUMENTS --json FILE` writes a file. NAME is the heading, unless the section names a command.
`amd-epyc` and `intel-xeon` are virtual machines with two cores. Virtual time is the same on any machine. Figures without a file are in [unrecorded.md](unrecorded.md).
[performance.md](../../docs/performance.md) says what they mean, [engine.md](../../docs/engine.md) for the engines."""


def page() -> str:
    """Raises SystemExit where files and sections do not fit."""
    sections: Mapping[str, Any] = tomllib.loads((RESULTS / "sections.toml").read_text())
    known = {name for section in sections.values() for name in section["files"]}
    found = {path.stem for path in RESULTS.glob("*.json")}
    if known != found:
        sys.exit(f"benchmarks/results/sections.toml: no section, or no file: {', '.join(sorted(known ^ found))}")
    parts = ["# Results of benchmarks", "<!-- Written by scripts/results.py; `make lint` compares. -->", INTRODUCTION]
    for name, section in sections.items():
        parts += shown_section(name, section)
    return "\n\n".join(parts) + "\n"


def shown_section(name: str, section: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {name}"
    yield f"{section.get('title') or first_line(name)} {section.get('about', '')}".strip()
    if command := section.get("command", ""):
        yield f"`{command}`"
    for file, arguments in section["files"].items():
        figures = json.loads((RESULTS / f"{file}.json").read_text())
        about = section.get("notes", {}).get(file, ""), f"`{arguments}`" if arguments else ""
        yield f"[{file}.json]({file}.json)" + "".join(f", {fact}" for fact in about if fact)
        for table in section.get("tables", ()):
            if lines := shown_table(Table(**table), figures):
                yield "\n".join(lines)


def first_line(benchmark: str) -> str:
    tree = ast.parse((ROOT / "benchmarks" / f"{benchmark}.py").read_text())
    return (ast.get_docstring(tree) or "").split("\n", 1)[0].replace("``", "`")


def shown_table(table: Table, figures: Row) -> list[str]:
    rows = [row for row in flat(figures, table.rows.split(".") if table.rows else []) if matches(row, table.where)]
    if table.within:
        rows = [{**row, **counts(row, table.within)} for row in rows]
    groups = list(dict.fromkeys(tuple(value(row, path) for path in table.across) for row in rows))
    cells: dict[tuple[str, ...], dict[tuple[tuple[Any, ...], str], Any]] = {}
    for row in rows:
        found = cells.setdefault(tuple(shown(value(row, path)) for path in table.labels), {})
        for path in table.figures:
            at = (tuple(value(row, path) for path in table.across), path)
            found[at] = value(row, path) + found.get(at, 0) if table.summed else found.get(at, value(row, path))
    columns = [(group, path) for group in groups for path in table.figures]
    columns = [at for at in columns if any(row.get(at) is not None for row in cells.values())]
    if not columns:
        return []
    heads = [*table.labels.values(), *(heading(table, group, path) for group, path in columns)]
    lines = [joined(heads), joined([*("-" for _ in table.labels), *("-:" for _ in columns)])]
    return [*lines, *(joined([*labels, *(shown(row.get(at)) for at in columns)]) for labels, row in cells.items())]


def heading(table: Table, group: tuple[Any, ...], path: str) -> str:
    """The values of a column's group, those that are no names with what they are; and its figure, where there are several."""
    of = ", ".join(
        part if isinstance(part, str) else f"{name.rpartition('.')[2]} {shown(part)}"
        for name, part in zip(table.across, group, strict=True)
    )
    figure = table.figures[path] if len(table.figures) > 1 or not of else ""
    return ": ".join(filter(None, (of, figure)))


def joined(cells: Sequence[str]) -> str:
    return f"|{'|'.join(cells)}|"


def flat(value: Any, path: Sequence[str], outer: Row | None = None) -> Iterator[Row]:
    """The rows at the end of a path, each with the plain values of what it lies in."""
    outer = outer or {}
    if isinstance(value, list):
        for item in value:
            yield from flat(item, path, outer)
    elif path:
        plain = {key: held for key, held in value.items() if not isinstance(held, list | dict)}
        yield from flat(value.get(path[0], []), path[1:], {**outer, **plain})
    else:
        yield {**outer, **value}


def matches(row: Row, where: Mapping[str, object]) -> bool:
    return all(row.get(key) == wanted for key, wanted in where.items())


def counts(row: Row, within: Mapping[str, float]) -> dict[str, int]:
    """1 for each bounded figure (``judged``), and for each that keeps its bound (``within``). One that is null does not."""
    found = [(value(row, path), bound) for path, bound in within.items()]
    return {"judged": len(found), "within": sum(figure is not None and figure <= bound for figure, bound in found)}


def value(row: Any, path: str) -> Any:
    """The value at a path of keys and indices, or None."""
    for key in path.split("."):
        if isinstance(row, list):
            row = row[int(key)]
        elif isinstance(row, Mapping):
            row = row.get(key)
    return row


def shown(figure: Any) -> str:
    """Three significant digits; a mapping as a list of its entries."""
    match figure:
        case None:
            return ""
        case bool():
            return "yes" if figure else "no"
        case float():
            return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
        case int():
            return f"{figure:,}"
        case Mapping():
            return ", ".join(f"{key}: {shown(held)}" for key, held in figure.items())
        case _:
            return str(figure)


if __name__ == "__main__":
    raise SystemExit(run("scripts.results", __doc__ or "", lambda: {PAGE: page()}))
