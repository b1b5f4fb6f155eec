from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_a_requests_path_counts_calls_files_and_records(tmp_path: Path) -> None:
    said = figures_of("request_path", tmp_path)
    figures = said["figures"]
    assert figures["calls"] == sum(said["calls_by_file"].values()) > figures["files"] == len(said["calls_by_file"])
    assert figures["records"] == figures["objects"] + figures["messages"] + figures["displays"]
    assert figures["records_types"] == len(said["records_by_type"])
    for package in (
        "src/triptych/services/gateway/",
        "src/triptych/services/router/",
        "src/triptych/services/encoder/",
        "src/triptych/services/text/",
        "src/triptych/wire/",
    ):
        assert any(file.startswith(package) for file in said["calls_by_file"])
