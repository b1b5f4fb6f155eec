"""The benchmark beside vLLM with tiny settings: it must run and measure; the figures do not matter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.versus_vllm import BASE, SYSTEMS

TIMEOUT_S = 900
pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.mark.parametrize(
    ("systems", "options", "unloaded"),
    [
        pytest.param((BASE, "triptych-vllm"), (), 9, id="vLLM alone and as the text engine"),
        pytest.param(
            (BASE, "triptych-apart"),
            ("--family", "llava", "--images", "2"),
            3,
            id="images alone of another family",
            marks=pytest.mark.extended,
        ),
        pytest.param(SYSTEMS, (), 9, id="all", marks=pytest.mark.extended),
    ],
)
def test_the_benchmark_measures_every_system(
    tmp_path: Path, systems: tuple[str, ...], options: tuple[str, ...], unloaded: int
) -> None:
    out = tmp_path / "versus_vllm.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.versus_vllm", "--smoke", *options),
            *("--systems", *systems[1:], "--json", str(out)),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S - 5,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(out.read_text())
    assert said["machine"]["cpu"]
    assert sorted(row["system"] for row in said["rows"]) == sorted(systems)
    assert all(row["requests"] == said["settings"]["requests"] and not row["failed"] for row in said["rows"])
    assert all(row["cpu_s_per_request"]["least"] > 0 for row in said["rows"])
    assert len(said["unloaded"]["ttft_s"]) == unloaded
