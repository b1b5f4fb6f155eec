from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_every_model_is_measured(tmp_path: Path) -> None:
    figures = figures_of("preparation", tmp_path)["figures"]
    assert {figure["model"] for figure in figures} == {"Llama 3.2 Vision", "InternVL", "Qwen3-VL"}
    assert all(figure["decode_ms"] > 0 and figure["process_ms"] > 0 for figure in figures)
