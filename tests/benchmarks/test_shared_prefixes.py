from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_shared_prefixes_measures_both_policies(tmp_path: Path) -> None:
    never, by_cost = figures_of("shared_prefixes", tmp_path)["rows"]
    assert (never["prefixes"], never["pulled"]) == ("never", 0.0)
    assert by_cost["prefixes"] == "by-cost"
    assert by_cost["pulled"] > 0.0
    assert by_cost["computed"] < never["computed"]
