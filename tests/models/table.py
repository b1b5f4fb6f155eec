"""Writes the table of tested models into docs/models.md from results of ``make test-models``: ``python -m tests.models.table FILE``;
with ``--check`` it compares them.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- Written by tests/models/table.py; `make test-models` compares. -->", "<!-- End of the table. -->"
HEADS = ("model_type", "media", "passes", "P and D apart", "needs torchvision")


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """One row for each model type; variants of a type, which follow two dashes, add their media to its row."""
    types = {name: known for name, known in sorted(results.items()) if "--" not in name and "passes" in known}
    media: dict[str, set[str]] = {}
    for name, known in results.items():
        media.setdefault(name.partition("--")[0], set()).update(known.get("media", ()))
    rows = [
        (
            f"`{name}`",
            ", ".join(sorted(media[name])),
            known["passes"],
            "yes" if known["transfers"] else "no",
            "yes" if known["torchvision"] else "",
        )
        for name, known in types.items()
    ]
    releases = ", ".join(sorted({known["transformers"] for known in types.values()}))
    return f"{len(types)} types, with `transformers` {releases}:\n\n{markdown(HEADS, rows)}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ("---",) * len(heads), *rows))


def with_table(page: str, begin: str, table: str) -> str:
    """The page with another table between the comments ``begin`` and ``END``."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.models.table", description="Write the table of tested models."
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--check", action="store_true", help="fail if the page has another table")
    chosen = parser.parse_args()
    results = json.loads(chosen.results.read_text())
    if not any(known.get("torchvision") for known in results.values()):
        sys.stderr.write("NOT COMPARED: the table of models, without those that need torchvision\n")
        return 0
    page = with_table(PAGE.read_text(), BEGIN, table(results))
    if not chosen.check:
        PAGE.write_text(page)
    elif PAGE.read_text() != page:
        sys.stderr.write("docs/models.md has another table of models: run python -m tests.models.table\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
