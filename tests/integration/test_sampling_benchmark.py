from pathlib import Path

import pytest

from tests.integration.quick_benchmark import TIMEOUT_S, figures_of

pytestmark = [pytest.mark.rotating, pytest.mark.timeout(TIMEOUT_S)]


@pytest.mark.slow
def test_every_case_is_measured_both_ways(tmp_path: Path) -> None:
    figures = figures_of("sampling", tmp_path)["figures"]
    assert len(figures) > 5
    assert all(one["batch_step_ms"] > 0 and one["rows_step_ms"] > 0 for one in figures)
    assert {one["case"] for one in figures if not one["batch_ms"]} == {"greedy"}
