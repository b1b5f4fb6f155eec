from pathlib import Path

import pytest

from tests.integration.quick_benchmark import TIMEOUT_S, figures_of

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def test_the_benchmark_of_products_compares_both_layouts_for_each_number_of_rows(tmp_path: Path) -> None:
    products = figures_of("products", tmp_path)["products"]
    assert [one["rows"] for one in products] == [1, 8, 32, 128, 512, 2048]
    assert all(one["plain_ms"] > 0 and one["packed_ms"] > 0 for one in products)
    assert products[-1]["chosen_packed"] == products[-2]["chosen_packed"]
