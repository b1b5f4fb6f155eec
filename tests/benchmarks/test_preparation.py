from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_every_model_is_measured(tmp_path: Path) -> None:
    figures = figures_of("preparation", tmp_path)["figures"]
    assert {one["model"] for one in figures} == {"Llama 3.2 Vision", "InternVL", "Qwen3-VL"}
    assert all(one["decode_ms"] > 0 and one["process_ms"] > 0 for one in figures)
