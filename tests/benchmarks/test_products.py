from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_products_compares_all_kinds_for_each_number_of_rows(tmp_path: Path) -> None:
    figures = figures_of("products", tmp_path)
    products = figures["products"]
    assert [product["rows"] for product in products] == [1, 2, 4, 8, 16, 32, 128, 512]
    kinds = {"plain", "onednn", "packed", "compiled"}
    assert all(product[f"{kind}_ms"] > 0 for product in products for kind in kinds)
    assert all(product["chosen"] in kinds and product["before"] in kinds - {"onednn"} for product in products)
    assert products[-1]["chosen"] != "compiled", "it is for few rows"
    assert [row["causal"] for row in figures["attention"]] == [True, False]
    assert all(row["torch_ms"] > 0 and row["products_ms"] > 0 for row in figures["attention"])
