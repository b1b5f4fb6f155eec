from pathlib import Path

import pytest

from tests.integration.quick_benchmark import TIMEOUT_S, figures_of

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def test_the_benchmark_of_roles_gives_every_placement_the_same_requests(tmp_path: Path) -> None:
    together, apart = figures_of("roles", tmp_path)["rows"]
    assert (together["placement"], apart["placement"]) == ("E+PD", "E+P+D")
    for row in (together, apart):
        (rate,) = row["rates"]
        assert rate["answered"] == rate["requests"] > 0
    assert together["rates"][0]["prompt_tokens"] == apart["rates"][0]["prompt_tokens"]
