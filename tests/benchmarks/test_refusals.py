from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_refusals_measures_gateway_and_router_of_two_trees_in_one_run(tmp_path: Path) -> None:
    rows = figures_of("refusals", tmp_path, "--before", str(Path(__file__).parents[2]))["refusals"]
    assert [(row["kind"], row["tree"]) for row in rows] == [
        (kind, tree) for kind in ("text", "image-shed") for tree in ("before", "now")
    ]
    assert all(row["gateway_us"] > 0 for row in rows)
    assert all(row["shed"] > 0 for row in rows if row["kind"] == "image-shed")
    assert all(row["gateway_ratio"] == [1, 1, 1] for row in rows if row["tree"] == "before")
