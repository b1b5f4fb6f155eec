from pathlib import Path

import pytest

from tests.integration.quick_benchmark import TIMEOUT_S, figures_of

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def test_the_benchmark_of_handing_over_compares_transports_with_copies(tmp_path: Path) -> None:
    copies, *others = figures_of("handoff", tmp_path)["rows"]
    assert (copies["system"], copies["x_memcpy"]) == ("memcpy", 1.0)
    assert {row["system"] for row in others} >= {"shm", "tcp"}
    assert all(row["how"] in {"one by one", "pipelined"} and row["ms"] > 0 for row in others)
