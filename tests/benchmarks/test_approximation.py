from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_approximations_compares_both(tmp_path: Path) -> None:
    figures = figures_of("approximation", tmp_path)
    assert {(row["load"], row["figure"]) for row in figures["summary"]} >= {("50%", "ttft p50"), ("", "goodput")}
    assert all(row["median"] <= row["worst"] for row in figures["summary"])
    [rate] = figures["goodput"]
    assert rate["machines"] > 0
    assert abs(rate["error"]) < 1
    assert {row["of"] for row in figures["orders"]} == {"latencies", "goodput"}
