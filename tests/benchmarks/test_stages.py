from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_stages_measures_every_system(tmp_path: Path) -> None:
    said = figures_of("stages", tmp_path)
    rows = {row["system"]: row for row in said["rows"]}
    assert set(rows) == {"alone", "whenever", "turns"}
    assert all(row["gap_p50_ms"] > 0 and row["first_token_p50_ms"] > 0 for row in rows.values())
    assert [bool(row["images_per_s"]) for row in rows.values()] == [False, True, True]
    assert said["settings"]["tpot_slo_ms"] > 0
