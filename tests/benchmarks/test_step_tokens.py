from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_token_budgets_measures_given_and_measured_ones(tmp_path: Path) -> None:
    rows = figures_of("step_tokens", tmp_path)["rows"]
    assert [(row["budget"], row["measured"]) for row in rows[:-1]] == [(64, False), (2048, False)]
    assert rows[-1]["measured"]
    assert 128 <= rows[-1]["budget"] <= 2048
    for row in rows:
        assert all(value > 0 for value in row["median"].values())
        two_steps = (
            2 * (row["budget"] - 8) - 16
        )  # of the long prompt, beside eight answers, and the short one in the second
        assert (row["median"]["short_s"] < row["median"]["long_s"]) == (two_steps < 900), (
            "it passes the long one between steps"
        )
        assert set(row["to_largest"]) == set(row["median"])
