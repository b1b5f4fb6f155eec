from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_tenants_measures_the_others_without_and_beside_the_one(tmp_path: Path) -> None:
    rows = {row["row"]: row for row in figures_of("tenants", tmp_path)["rows"]}
    assert rows["alone"]["one"] == rows["alone"]["others_failed"] == 0
    for row in rows.values():
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
    assert rows["beside"]["one"] > rows["beside"]["one_answered"] > 0
