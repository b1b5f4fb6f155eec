from pathlib import Path

from benchmarks.transport import available_backends
from tests.benchmarks.quick import figures_of


def test_the_transport_benchmark_measures_every_backend(tmp_path: Path) -> None:
    said = figures_of("transport", tmp_path)
    systems = {"memcpy", "tls", "socket", "sockets", "grpc", *available_backends()}
    assert {row["system"] for row in said["rows"]} == systems
    assert {row["system"] for row in said["small"]} == systems
    assert all(row["gb_per_s"] > 0 for row in said["rows"])
    assert said["settings"]["sizes"]
