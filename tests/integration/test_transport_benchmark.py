"""The transport benchmark runs, over every system, with tiny settings."""

import json
import subprocess
import sys
from pathlib import Path

from triptych.transport.probe import available_backends


def test_the_transport_benchmark_measures_every_backend(tmp_path: Path) -> None:
    out = tmp_path / "transport.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.transport", "--quick", "--json", str(out)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(out.read_text())
    systems = {"memcpy", "socket", "sockets", "grpc", *available_backends()}
    assert {row["system"] for row in said["rows"]} == systems
    assert {row["system"] for row in said["small"]} == systems
    assert all(row["gb_per_s"] > 0 for row in said["rows"])
    assert said["machine"]["cpu"]
    assert said["settings"]["sizes"]
