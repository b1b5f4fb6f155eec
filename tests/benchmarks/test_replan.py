from pathlib import Path

import pytest

from tests.benchmarks.quick import TIMEOUT_S, figures_of


@pytest.mark.timeout(TIMEOUT_S)
def test_the_benchmark_of_plans_that_are_made_again_moves_and_no_request_fails(tmp_path: Path) -> None:
    figures = figures_of("replan", tmp_path)
    [replan] = figures["rows"]
    assert replan["row"] == "replan"
    assert not replan["errors"], "none failed, and none was refused"
    assert figures["searches"]
    assert any("plan 1" in text for _, text in replan["changes"])
