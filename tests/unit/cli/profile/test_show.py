"""Profiles as text and as plots."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.policy.profiles import DECODER, ENCODER
from triptych.cli.profile import show
from triptych.domain.profile import LoadRow
from triptych.domain.stage import Stage


def shown(console: Console, *tables: object) -> str:
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    return captured.get()


def test_tables_have_milliseconds_and_are_sorted() -> None:
    level = LoadRow(Stage.ENCODE, 4, 196, 0, 1000.0, 0.1, 0.2, 0.3, 0.15, 0.03)
    text = shown(Console(width=200), *show.tables(replace(ENCODER, load=(level,), encode=ENCODER.encode[::-1])))
    assert text.index("encode") < text.index("prepare") < text.index("load")
    assert "time (ms)" in text
    assert "mean_square (ms2)" in text
    (row,) = (line for line in text.splitlines() if "1e+03" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        *("encode", "4", "196", "0", "1e+03", "100", "200", "300", "150", "3e+04")
    ]
    assert text.index("│ 100         │ 1 ") < text.index("│ 100         │ 2 ") < text.index("│ 400         │ 8 ")


def test_the_largest_load_is_named_or_that_there_is_none() -> None:
    report = {"objectives": {"prefill": 0.5, "decode": 0.02}, "tokens_per_s": 1234.0, "max_batch": 8}
    assert show.search_result(report, 5) == (
        "up to 1234 tokens/s with batches of up to 8 within the objectives (P99: prefill 500 ms, decode 20 ms; 5 times the "
        "latency without load)"
    )
    assert show.search_result(report | {"tokens_per_s": 0.0}, 5).startswith("no measured load meets the objectives")


@pytest.mark.slow
def test_plots_are_written(tmp_path: Path) -> None:
    for profile in (ENCODER, DECODER, replace(ENCODER, encode=(), prepare=())):
        show.plot(tmp_path / "plot.png", profile)
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
