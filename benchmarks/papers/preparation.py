"""What preprocessing of an image takes on one core, as ``python -m benchmarks.preparation`` measured it."""

import json
from pathlib import Path

_RESULTS = Path(__file__).parents[1] / "results" / "preparation-amd-epyc.json"


def process_s(model: str) -> float:
    """Of an image that is decoded already, by transformers' processor of that model."""
    figures = json.loads(_RESULTS.read_text())["figures"]
    return float(next(row["process_ms"] for row in figures if row["model"] == model)) / 1000
