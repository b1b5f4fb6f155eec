from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_switching_shows_that_encoders_help_with_long_answers(tmp_path: Path) -> None:
    fixed, switching, from_start = figures_of("switching", tmp_path)["rows"]
    assert fixed["switched"] == from_start["switched"] == []
    assert {role for _, role in switching["switched"]} == {"D"}
    assert from_start["latency_s"] < switching["latency_s"] < 0.8 * fixed["latency_s"]


def test_the_same_load_is_replayed_at_real_processes(tmp_path: Path) -> None:
    figures = figures_of("switching", tmp_path, "--processes")
    (virtual,), (real,) = figures["rows"], figures["processes"]
    assert (virtual["row"], virtual["requests"]) == (real["row"], real["requests"]) == ("switching", 12)
    assert real["latency_s"] > 0.4 + 0.46 + 0.045, "at least preparation, encoding and prefill"
