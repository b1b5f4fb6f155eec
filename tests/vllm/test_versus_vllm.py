"""The benchmark beside vLLM with tiny settings: it must run and measure; the figures do not matter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.versus_vllm import SYSTEMS

TIMEOUT_S = 900
pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S)]


def test_the_benchmark_measures_every_system(tmp_path: Path) -> None:
    out = tmp_path / "versus_vllm.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.versus_vllm", "--smoke", "--json", str(out)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S - 5,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(out.read_text())
    assert said["machine"]["cpu"]
    assert sorted(row["system"] for row in said["rows"]) == sorted(SYSTEMS)
    assert all(row["requests"] == said["settings"]["requests"] and not row["failed"] for row in said["rows"])
    assert len(said["unloaded"]["ttft_s"]) == 9
