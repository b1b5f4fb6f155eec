from pathlib import Path

import pytest

from tests.integration.quick_benchmark import TIMEOUT_S, figures_of

pytestmark = [pytest.mark.rotating, pytest.mark.timeout(TIMEOUT_S)]


def test_the_benchmark_of_early_prefill_measures_both_policies(tmp_path: Path) -> None:
    complete, prefix = figures_of("early_prefill", tmp_path)["rows"]
    assert (complete["dispatch"], complete["early"]) == ("complete", 0.0)
    assert prefix["dispatch"] == "prefix"
    assert 0.0 < prefix["early"] <= 1.0
