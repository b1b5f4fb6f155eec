from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_decisions_measures_two_trees_in_one_run(tmp_path: Path) -> None:
    rows = figures_of("router_decisions", tmp_path, "--before", str(Path(__file__).parents[2]))["decisions"]
    assert [(row["tree"], row["reports"]) for row in rows] == [
        (tree, reports) for reports in (0, 17, 68) for tree in ("before", "now")
    ]
    assert all(row["request_us"] > 0 for row in rows)
    assert all((row["reports_us"] > 0) is (row["reports"] > 0) for row in rows)
    assert all(row["request_ratio"] == row["total_ratio"] == [1, 1, 1] for row in rows if row["tree"] == "before")
