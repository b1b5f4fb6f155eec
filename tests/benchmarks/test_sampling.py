from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_every_case_is_measured_both_ways(tmp_path: Path) -> None:
    figures = figures_of("sampling", tmp_path)["figures"]
    assert len(figures) > 5
    assert all(one["batch_step_ms"] > 0 and one["rows_step_ms"] > 0 for one in figures)
    assert {one["case"] for one in figures if not one["batch_ms"]} == {"greedy"}
