from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_every_order_serves_the_same_requests_of_a_mixed_load(tmp_path: Path) -> None:
    figures = figures_of("late_requests", tmp_path)
    rows = {row["order"]: row for row in figures["rows"]}
    assert rows.keys() == set(figures["settings"]["orders"])
    assert len({row["images"] for row in rows.values()}) == 1
    for row in rows.values():
        assert 0 < row["image_ttft_s"]["p50"] <= row["image_ttft_s"]["p99"]
        assert row["goodput_per_s"] > 0
