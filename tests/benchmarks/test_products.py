from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_products_compares_all_kinds_for_each_number_of_rows(tmp_path: Path) -> None:
    figures = figures_of("products", tmp_path)
    products = figures["products"]
    assert [one["rows"] for one in products] == [1, 2, 4, 8, 16, 32, 128, 512]
    kinds = {"plain", "onednn", "packed", "compiled"}
    assert all(one[f"{kind}_ms"] > 0 for one in products for kind in kinds)
    assert all(one["chosen"] in kinds and one["before"] in kinds - {"onednn"} for one in products)
    assert products[-1]["chosen"] != "compiled", "it is for few rows"
    assert [one["causal"] for one in figures["attention"]] == [True, False]
    assert all(one["torch_ms"] > 0 and one["products_ms"] > 0 for one in figures["attention"])
