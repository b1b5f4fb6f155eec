"""The router benchmark runs, over every system, with tiny settings."""

import json
import subprocess
import sys
from pathlib import Path

SYSTEMS = {"relay", "router", "gateway", "mounted"}


def test_the_router_benchmark_measures_every_system(tmp_path: Path) -> None:
    out = tmp_path / "router_overhead.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.router_overhead", "--quick", "--json", str(out)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(out.read_text())
    for rows in (said["first_token"], said["saturation"]):
        assert {row["system"] for row in rows} == SYSTEMS
    assert all(row["requests"] > 0 for row in said["saturation"])
    gateways = [row for row in said["saturation"] if row["system"] == "gateway"]
    assert all(set(row["cpu_ms"]) == {"gateway", "router"} for row in gateways)
    assert said["machine"]["cpu"]
