from pathlib import Path

import pytest

from tests.benchmarks.quick import TIMEOUT_S, figures_of

pytestmark = [pytest.mark.extended, pytest.mark.timeout(TIMEOUT_S)]


def test_the_benchmark_measures_both_engines(tmp_path: Path) -> None:
    said = figures_of("vllm_encoders", tmp_path)
    assert [row["batch"] for row in said["rows"]] == said["settings"]["batches"]
    assert all(row["own_ms"] > 0 and row["vllm_ms"] > 0 for row in said["rows"])
    assert all(len(row["vllm_to_own"]) == 3 for row in said["rows"])
