from pathlib import Path

from tests.benchmarks.quick import figures_of

SYSTEMS = {"relay", "plain", "router", "gateway", "mounted"}


def test_the_router_benchmark_measures_every_system(tmp_path: Path) -> None:
    said = figures_of("router_overhead", tmp_path)
    for rows in (said["first_token"], said["saturation"]):
        assert {row["system"] for row in rows} == SYSTEMS
    assert all(row["requests"] > 0 for row in said["saturation"])
    gateways = [row for row in said["saturation"] if row["system"] == "gateway"]
    assert all(set(row["cpu_ms"]) == {"gateway", "router"} for row in gateways)
