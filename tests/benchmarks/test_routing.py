import json
import time
from pathlib import Path

import pytest

from benchmarks.routing import router_cpu, trace_directory
from tests.benchmarks.quick import figures_of
from triptych.machine.router.cluster import ClusterMachine


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """One client of a ServeGen workload, which asks all day long."""
    directory = tmp_path / "servegen"
    directory.mkdir()
    rows = "".join(f"{start},12,1,Gamma,1,0.08\n" for start in range(0, 86_400, 600))
    (directory / "chunk-0-trace.csv").write_text(rows)
    sizes = {
        "text_tokens": "{64: 0.5, 500: 0.5}",
        "image_tokens": "{256: 0.6, 1225: 0.4}",
        "image_count": "{1: 0.8, 4: 0.2}",
        "output_tokens": "{4: 0.5, 20: 0.5}",
    }
    (directory / "chunk-0-dataset.json").write_text(json.dumps({"0": sizes}))
    return directory


def test_the_benchmark_of_routing_measures_every_step(traces: Path, tmp_path: Path) -> None:
    said = figures_of("routing", tmp_path, "--traces", str(traces))
    splits = said["settings"]["splits"]
    assert [(row["step"], row["split"]) for row in said["rows"]] == [
        (step, split)
        for step in said["settings"]["steps"]
        for split in (["8"] if step.startswith("monolith") else splits)
    ]
    assert all(said["capacity_per_s"]["decoder-only"][split]["middle"] > 0 for split in splits)
    for row in said["rows"]:
        assert row["failed"] == 0
        assert 0 < row["mean_ms"]["short"]["least"] <= row["p99_ms"]["short"]["most"]
        assert 0 < row["goodput_per_s"]["middle"] <= row["per_s"]["middle"]
        assert row["router_us"]["least"] > 0


def test_the_time_of_the_router_is_that_of_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(works_s: float, waits_s: float) -> None:
        time.sleep(waits_s)
        until_s = time.thread_time() + works_s
        while time.thread_time() < until_s:
            pass

    monkeypatch.setattr(ClusterMachine, "handle", handle)
    with router_cpu() as spent:
        ClusterMachine.handle(0.02, 0.2)  # type: ignore[call-arg,arg-type]
    assert 0.02 <= spent.seconds < 0.1


def test_it_says_what_is_missing_without_a_trace(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"nowhere has no chunk-N-trace\.csv: this benchmark samples a ServeGen workload"
    ):
        trace_directory(tmp_path / "nowhere")
