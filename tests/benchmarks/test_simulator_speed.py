from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_the_simulator_measures_both_fidelities(tmp_path: Path) -> None:
    rows = figures_of("simulator_speed", tmp_path)["costs"]
    assert [(row["fidelity"], row["encoders"], row["texts"]) for row in rows] == [
        ("services", 6, 2),
        ("machines", 6, 2),
    ]
    assert all(0 < row["least_us"] <= row["request_us"] <= row["most_us"] for row in rows)
    assert rows[0]["requests"] == rows[1]["requests"]
