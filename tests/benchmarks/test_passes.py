from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_passes_times_prompts_and_decode_steps(tmp_path: Path) -> None:
    rows = figures_of("passes", tmp_path)["rows"]
    assert [row["kind"] for row in rows] == ["ours", "eager"]
    for row in rows:
        assert set(row["prompt_ms"]) == {"16"}
        assert set(row["decode_ms"]) == {"1", "2"}
        assert all(value > 0 for value in (*row["prompt_ms"].values(), *row["decode_ms"].values()))
