from pathlib import Path

from benchmarks.roles import verdict
from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_roles_gives_every_placement_the_same_requests(tmp_path: Path) -> None:
    together, apart = figures_of("roles", tmp_path)["rows"]
    assert (together["placement"], apart["placement"]) == ("E+PD", "E+P+D")
    for row in (together, apart):
        (rate,) = row["rates"]
        assert rate["answered"] == rate["requests"] > 0
    assert together["rates"][0]["prompt_tokens"] == apart["rates"][0]["prompt_tokens"]


def test_it_says_which_placements_win_and_lose() -> None:
    found = {"EPD": 4.0, "EPD, budgets": 6.0, "E+PD": 8.0, "EP+D": 8.0}
    said = verdict([{"placement": name, "goodput": goodput} for name, goodput in found.items()])
    assert said == "best: E+PD; EP+D (8); least: EPD (4); EPD, budgets: 0.75 times the best"
    assert verdict([{"placement": name, "goodput": 2.0} for name in found]) == "all have 2"
