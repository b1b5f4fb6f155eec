from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_analytic_costs_measures_tables_and_steps_with_a_prompt(tmp_path: Path) -> None:
    figures = figures_of("analytic", tmp_path)
    assert {row["table"] for row in figures["errors"]} == {"prefill", "decode"}
    for row in figures["errors"]:
        assert min(row["catalogue"], row["held_out"], row["other_model"]) >= 0
    assert len(figures["steps"]) == 3 * 2 * 3
    for step in figures["steps"]:
        assert 0 < step["one_pass_ms"] <= step["sum_ms"]
