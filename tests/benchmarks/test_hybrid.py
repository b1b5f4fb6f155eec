"""``benchmarks.threads`` and ``benchmarks.hybrid`` work."""

from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_threads_are_compared_by_processes_and_by_how_they_wait(tmp_path: Path) -> None:
    rows = figures_of("threads", tmp_path)["rows"]
    assert [(row["processes"], row["threads"], row["wait"]) for row in rows] == [(1, 1, "active"), (2, 2, "passive")]
    assert all(rate > 0 for row in rows for rate in row["rates"].values())


def test_a_hybrid_is_compared_with_instances_apart(tmp_path: Path) -> None:
    rows = figures_of("hybrid", tmp_path)["rows"]
    assert [row["system"] for row in rows] == ["apart", "hybrid, 2 threads"]
    assert all((row["requests"], row["failed"]) == (6, 0) for row in rows)
    assert all(row["text_ttft_p50"] > 0 and row["tpot_p50"] > 0 for row in rows)
