"""Runs benchmarks with tiny settings: they must run and measure; the figures do not matter."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 180
"""Of a test: the longest takes half a minute alone, and other tests run at the same time."""


def figures_of(name: str, directory: Path, *arguments: str) -> dict[str, Any]:
    """Runs ``benchmarks.<name> --quick`` with these arguments; returns its output, which describes the machine."""
    out = directory / f"{name}.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(out), *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(out.read_text())
    assert said["machine"]["cpu"]
    return said
