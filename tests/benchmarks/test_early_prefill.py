from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_early_prefill_measures_both_policies(tmp_path: Path) -> None:
    complete, prefix = figures_of("early_prefill", tmp_path)["rows"]
    assert (complete["dispatch"], complete["early"]) == ("complete", 0.0)
    assert prefix["dispatch"] == "prefix"
    assert 0.0 < prefix["early"] <= 1.0
