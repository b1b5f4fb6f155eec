import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import soak
from tests.integration.transport.test_soak import shared_memory_files

SEED = 5


def test_a_soak_records_what_it_has_simulated_with_which_seeds(tmp_path: Path) -> None:
    record = tmp_path / "soak.json"
    chosen = ("--parts", "simulation", "--minutes", "0.05", "--seed", str(SEED), "--json", str(record))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *chosen],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(record.read_text())
    simulation, left = said["parts"]
    assert (simulation["part"], simulation["first_seed"], simulation["failures"]) == ("simulation", SEED, [])
    assert simulation["ran"]["long"] == 1
    assert sum(simulation["ran"].values()) >= 2
    assert sum(row["samples"] for row in simulation["growth"]) == sum(simulation["ran"].values())
    assert (left["part"], left["failed"]) == ("left over", 0)
    assert said["settings"]["seed"] == SEED


def test_a_simulation_that_fails_is_told_with_what_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(seed: int) -> None:
        raise AssertionError(f"an answer of seed {seed} is wrong")

    monkeypatch.setattr(soak, "SIMULATIONS", {"faults": fails})
    assert "an answer of seed 7 is wrong" in soak.simulated("faults", 7).error
    assert soak.again("faults:7", 0.0) == 1
    assert "an answer of seed 7 is wrong" in capsys.readouterr().out


def test_a_process_whose_parent_has_ended_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(soak.MARK, "another")
    mark, shared = soak.marked(), shared_memory_files()
    start = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    started = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
    orphan = psutil.Process(int(started.stdout))
    try:
        while soak.MARK not in orphan.environ():  # empty until the kernel has laid out the program
            time.sleep(0.001)
        assert [failure["error"] for failure in soak.left_over(shared, mark, 0.1).failures] == ["sleep 600"]
        assert soak.left_over(shared, "of another soak", 0.1).failures == []
    finally:
        orphan.kill()
    assert soak.left_over(shared, mark).failures == []


@pytest.mark.parametrize(("later", "fails"), [(40.0, False), (43.0, True)])
def test_a_process_that_grows_fails(later: float, fails: bool) -> None:
    part = soak.Part("processes", figures={"growth": []})
    samples = [9.0, 90.0, 10.0, 70.0, later, later + 70.0]
    soak.grown(part, "gateway-1", {"rss_mib": samples}, soak.GROWTH)
    assert [failure["what"] for failure in part.failures] == ["gateway-1 grows"] * fails
    assert part.figures["growth"] == [
        {"process": "gateway-1", "samples": 6, "rss_mib_before": 10.0, "rss_mib_after": later}
    ]
