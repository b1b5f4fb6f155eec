"""Published tables: each row from formulas is within the tolerance or says why it is not; and what the simulated ones rest on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.papers import epd_serve, hydrainfer
from benchmarks.papers.__main__ import PAPERS, main
from benchmarks.papers.rows import Row
from benchmarks.papers.simulation import Served, goodput, plan, serve
from triptych.workload.report import Record


@pytest.mark.parametrize(
    "row", [row for paper in PAPERS for row in paper.rows()], ids=lambda row: f"{row.table}: {row.what}"
)
def test_a_row_agrees_or_says_why_it_differs(row: Row) -> None:
    assert row.agrees or row.differs


def test_most_rows_agree() -> None:
    rows = [row for paper in PAPERS for row in paper.rows()]
    assert sum(row.agrees for row in rows) >= 0.7 * len(rows)


def test_all_tables_are_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "papers.json"
    assert main(["--formulas", "--json", str(written)]) == 0
    printed, rows = capsys.readouterr().out, json.loads(written.read_text())["rows"]
    assert all(paper.TITLE in printed for paper in PAPERS)
    assert len(rows) == sum(len(list(paper.rows())) for paper in PAPERS)


@pytest.mark.parametrize("images", [2, 4])
def test_costs_from_two_rows_give_these_rows(images: int) -> None:
    measured = epd_serve.table_4_costs()
    made = epd_serve.minicpm("E:6,P:1,D:1", measured)
    load = epd_serve.requests_of(images, epd_serve.SLICES, together=True)
    ttft_s = serve(made, plan(load, 0.01, 5, 1)).ttft_s + measured.request_s
    assert ttft_s == pytest.approx(epd_serve.TABLE_4[images][1], rel=0.03)


def test_parallel_encoders_take_the_time_of_the_busiest() -> None:
    measured = epd_serve.table_4_costs()
    made = epd_serve.minicpm("E:6,P:1,D:1", measured)
    apart, together = (
        serve(made, plan(epd_serve.requests_of(8, epd_serve.SLICES, together=as_one_item), 0.01, 5, 1)).ttft_s
        for as_one_item in (False, True)
    )
    image_s = epd_serve.SLICES * epd_serve.SLICE_TOKENS * measured.token_s
    assert together - apart == pytest.approx(6 * image_s, rel=0.05), (
        "8 images one after another, or 2 at the busiest of six"
    )


def test_gaps_between_tokens_are_those_of_the_mean() -> None:
    requests = plan(hydrainfer.TEXTCAPS.load, 8.0, 20, 1)
    for roles in ("EPD:2", "E:1,P:2,D:2"):
        served = serve(hydrainfer.hybrid(roles), requests, keeps_gaps=True)
        for record, gaps_s in zip(served.records, served.gaps_s, strict=True):
            assert len(gaps_s) == record.tokens - 1
            assert sum(gaps_s) == pytest.approx(record.end_s - (record.ttft_s or 0.0), abs=0.005)


def test_a_request_is_judged_by_nine_of_ten_gaps() -> None:
    record = Record(plan(hydrainfer.TEXTCAPS.load, 1.0, 1, 1).requests[0], ttft_s=0.5, end_s=1.0, tokens=11)
    served = Served([record], 1.0, [[0.01] * 9 + [0.3]])
    assert served.attained_by_gaps(0.5, 0.1) == 1
    assert served.attained_by_gaps(0.4, 0.1) == 0
    assert replace(served, gaps_s=[[0.01] * 8 + [0.3] * 2]).attained_by_gaps(0.5, 0.1) == 0


@pytest.mark.parametrize(("ours", "error"), [(30, 0), (50, 0), (55, 0.1), (15, 0.5)])
def test_a_range_has_no_error_within_it(ours: float, error: float) -> None:
    assert Row("1", "a range", 30, ours, until=50).error == pytest.approx(error)


def test_goodput_is_the_highest_good_rate() -> None:
    assert goodput(lambda rate: rate <= 5.5, 1, 64) == pytest.approx(5.5, rel=0.04)
    assert goodput(lambda rate: rate <= 0.5, 1, 64) == 0
