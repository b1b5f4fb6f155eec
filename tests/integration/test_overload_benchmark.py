from pathlib import Path

import pytest

from tests.integration.quick_benchmark import TIMEOUT_S, figures_of

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def test_the_benchmark_of_overload_refuses_and_loses_no_request(tmp_path: Path) -> None:
    (run,) = figures_of("overload", tmp_path)["runs"]
    calm, crowded = run["rows"]
    assert run["capacity"] > 0
    assert (calm["broken"], crowded["broken"]) == (0, 0)
    for row in (calm, crowded):
        assert set(row["statuses"]) <= {"200", "429", "504"}
        assert row["answered_in_time"] + row["refused"] + row["late"] == row["sent"]
    assert crowded["refused"] > 0
    assert crowded["answered_in_time"] > 0
