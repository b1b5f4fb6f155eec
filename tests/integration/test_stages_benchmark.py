"""The benchmark of stages that share a device runs, over every system, with tiny settings."""

import json
import subprocess
import sys
from pathlib import Path


def test_the_benchmark_of_stages_measures_every_system(tmp_path: Path) -> None:
    out = tmp_path / "stages.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.stages", "--quick", "--json", str(out)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(out.read_text())
    rows = {row["system"]: row for row in said["rows"]}
    assert set(rows) == {"alone", "whenever", "turns"}
    assert all(row["gap_p50_ms"] > 0 and row["first_token_p50_ms"] > 0 for row in rows.values())
    assert [bool(row["images_per_s"]) for row in rows.values()] == [False, True, True]
    assert said["machine"]["cpu"]
    assert said["settings"]["tpot_slo_ms"] > 0
