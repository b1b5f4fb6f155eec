from pathlib import Path

import pytest

from tests.integration.quick_benchmark import TIMEOUT_S, figures_of

pytestmark = [pytest.mark.rotating, pytest.mark.timeout(TIMEOUT_S)]


def test_the_benchmark_of_shared_prefixes_measures_both_policies(tmp_path: Path) -> None:
    never, by_cost = figures_of("shared_prefixes", tmp_path)["rows"]
    assert (never["prefixes"], never["pulled"]) == ("never", 0.0)
    assert by_cost["prefixes"] == "by-cost"
    assert by_cost["pulled"] > 0.0
    assert by_cost["computed"] < never["computed"]
