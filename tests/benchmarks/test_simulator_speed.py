from pathlib import Path

import pytest

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_the_simulator_measures_each_fidelity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIPTYCH_TEST_TRACES", raising=False)
    figures = figures_of("simulator_speed", tmp_path)
    rows = figures["costs"]
    assert [(row["fidelity"], row["encoders"], row["texts"]) for row in rows] == [
        ("services", 6, 2),
        ("machines", 6, 2),
        ("queues", 6, 2),
    ]
    assert all(0 < row["least_us"] <= row["request_us"] <= row["most_us"] for row in rows)
    assert rows[0]["requests"] == rows[1]["requests"] == rows[2]["requests"]
    [hour] = figures["hours"]
    assert hour["fidelity"] == "queues"
    assert hour["requests"] == hour["answered"] > 50
