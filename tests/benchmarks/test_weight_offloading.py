from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_weight_offloading_compares_switches_with_and_without_a_load(tmp_path: Path) -> None:
    rows = figures_of("weight_offloading", tmp_path)["rows"]
    assert [row["resident"] for row in rows] == ["all", "role"]
    assert all(row["open_encode_ms"] > 0 and row["gap_opening_ms"] > 0 for row in rows)
