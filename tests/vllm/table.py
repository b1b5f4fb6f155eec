"""Writes the table of tested models into docs/vllm.md from results of ``make test-vllm``: ``python -m tests.vllm.table FILE``."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from tests.models.table import markdown, with_table

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
BEGIN = "<!-- Written by tests/vllm/table.py; `make test-vllm` runs it. -->"
HEADS = ("model_type", "media", "same answers as")


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    rows = [(f"`{name}`", known["media"], known["reference"]) for name, known in sorted(results.items())]
    return f"{len(rows)} types:\n\n{markdown(HEADS, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.table", description="Write the table of tested models.")
    parser.add_argument("results", type=Path)
    results = json.loads(parser.parse_args().results.read_text())
    PAGE.write_text(with_table(PAGE.read_text(), BEGIN, table(results)))


if __name__ == "__main__":
    main()
