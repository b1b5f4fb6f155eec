from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_where_to_encode_measures_every_cluster(tmp_path: Path) -> None:
    rows = {row["cluster"]: row for row in figures_of("where_to_encode", tmp_path)["rows"]}
    assert rows["apart"]["here"] == 0.0
    assert 0.0 < rows["tokens"]["here"] < rows["predicted"]["here"] < 1.0
    assert rows["predicted"]["ttft_mean_ms"] < rows["tokens"]["ttft_mean_ms"]
