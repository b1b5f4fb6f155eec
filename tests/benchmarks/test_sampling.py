from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_every_case_is_measured_both_ways(tmp_path: Path) -> None:
    figures = figures_of("sampling", tmp_path)["figures"]
    assert len(figures) > 5
    assert all(row["batch_step_ms"] > 0 and row["rows_step_ms"] > 0 for row in figures)
    assert {row["case"] for row in figures if not row["batch_ms"]} == {"greedy"}
