from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_costs_measures_every_variant(tmp_path: Path) -> None:
    rows = figures_of("router_costs", tmp_path)["costs"]
    assert [(row["variant"], row["system"], row["images"]) for row in rows] == [
        (variant, system, images)
        for system in ("router", "gateway")
        for images in (0, 4)
        for variant in ("no metrics", "metrics", "mutual TLS", "10 % traced", "all traced")
    ]
    assert all(row["requests"] > 0 and row["cpu_ms"] > 0 for row in rows)
    assert all(row["ratio"] == 1 for row in rows if row["variant"] == "metrics")
