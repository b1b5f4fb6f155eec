from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_embedding_hints_shows_that_images_are_encoded_once(tmp_path: Path) -> None:
    rows = figures_of("embedding_hints", tmp_path)["rows"]
    for without, told in zip(rows[::2], rows[1::2], strict=True):
        assert (without["hints"], told["hints"]) == (False, True)
        assert without["hits"] < told["hits"] <= told["best"]
        assert (without["hints_per_request"], told["hints_per_request"] > 0) == (0, True)
