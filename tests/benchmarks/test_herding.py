from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_several_routers_that_notice_each_other_choose_the_same_instances_less_often(tmp_path: Path) -> None:
    figures = figures_of("herding", tmp_path)
    (load,) = figures["settings"]["loads"]
    means = {(row["policy"], row["routers"]): row["ttft_mean_ms"] for row in figures["rows"]}
    assert len(means) == len(figures["rows"]) == 6
    assert all(row["load"] == load and row["ttft_p99_ms"] > row["ttft_mean_ms"] > 0 for row in figures["rows"])
    assert means["least-loaded", 1] == means["untold", 1], "one router chooses the least loaded"
    assert means["least-loaded", 4] < 0.95 * means["untold", 4]
