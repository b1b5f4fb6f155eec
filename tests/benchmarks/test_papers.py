"""Published tables: each row from formulas is within the tolerance or says why it is not; and what the simulated ones rest on."""

import json
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.papers import epd_serve, hydrainfer, modserve, vllm_blog
from benchmarks.papers.__main__ import PAPERS, main
from benchmarks.papers.preparation import process_s
from benchmarks.papers.rows import Row
from benchmarks.papers.simulation import Goodput, Known, Served, goodput, goodput_by_line, plan, serve
from scripts.results import counts
from triptych.workload.report import Record
from triptych.workload.requests import Plan


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
    assert goodput(lambda rate: rate <= 5.5, 1, 64).figure == pytest.approx(5.5, rel=0.04)
    assert goodput_by_line([(1, 0.0), (2, 0.3), (4, 0.7)], 0.5) == Goodput.found(3)


def within(seconds: float, requests: Plan) -> Served:
    """All first tokens after a share of ``seconds``, and answers at once after them."""
    records = [Record(planned, 0.0, seconds / 2, seconds, tokens=11) for planned in requests.requests]
    return Served(records, requests.duration_s + seconds, [[seconds / 20] * 10 for _ in records])


def test_a_rate_at_the_end_of_those_that_were_tried_is_not_a_result() -> None:
    unbounded = (
        goodput(lambda _: True, 1, 64),
        goodput_by_line([(1, 0.0), (64, 0.1)], 0.5),
        vllm_blog.held(partial(within, 0.1), vllm_blog.requests_of(400, 1)),
        hydrainfer.Tried(partial(within, 0.1), hydrainfer.TEXTCAPS.load).goodput(2.0, 0.08),
        modserve.Curve(partial(within, 0.1), lambda *_: False).held(10.0, (0.05, 0.05)),
    )
    for found, highest in zip(
        unbounded, (64, 64, vllm_blog.HIGHEST, hydrainfer.RATES[-1], modserve.RATES[-1]), strict=True
    ):
        assert found == Goodput(highest, inf)
        assert found.figure is None
        assert found.instead == f"more than {highest:.3g} requests/s, the most tried"
    none_borne = (
        goodput(lambda rate: rate <= 0.5, 1, 64),
        goodput_by_line([(1, 0.6), (64, 0.9)], 0.5),
        modserve.Curve(partial(within, 1.0), lambda *_: True).held(2.0, (0.05, 0.05)),
    )
    for found, least in zip(none_borne, (1, 1, modserve.RATES[0]), strict=True):
        assert found == Goodput(0.0, least)
        assert found.figure is None
        assert found.instead == f"less than {least:g} requests/s, the least tried"


def test_a_ratio_to_a_rate_that_was_not_found_is_a_bound() -> None:
    found, more, less = Goodput.found(12.0), Goodput(24.0, inf), Goodput(0.0, 4.0)
    assert found.over(Goodput.found(8.0)) == Known.found(1.5)
    assert [more.over(found).instead, found.over(less).instead] == ["at least 2", "at least 3"]
    assert [found.over(more).instead, less.over(found).instead] == ["at most 0.5", "at most 0.333"]
    assert more.over(more).figure is less.over(less).figure is None
    assert more.over(more).instead == "both bear more than 24 requests/s, the most tried"
    assert less.over(less).instead == "both bear less than 4 requests/s, the least tried"


@pytest.mark.parametrize("published", [24, None])
def test_a_row_whose_figure_was_not_found_does_not_agree(published: float | None) -> None:
    found = Goodput(24.0, inf)
    row = Row("1", "goodput", published, found.figure, differs="the rates end", instead=found.instead)
    assert not row.agrees
    assert row.document("a paper")["instead"] == "more than 24 requests/s, the most tried"
    assert counts(row.document("a paper"), {"error": 0.1}) == {"judged": 1, "within": 0}


@pytest.mark.parametrize(
    ("paper", "table", "engines"),
    [
        (vllm_blog, 0, "serve_in_step"),
        (hydrainfer, 0, "serve_apart"),
        (modserve, len(modserve.SIMULATED), "serve_apart"),
    ],
)
def test_rows_of_systems_that_bear_all_rates_have_no_figures(
    paper: ModuleType, table: int, engines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "serve", lambda _, requests, **__: within(0.1, requests))
    monkeypatch.setattr(paper, engines, lambda _, __, requests, ___: within(0.1, requests))
    rows = [row for row in paper.simulated()[table]() if row.table != "tails"]
    assert rows
    assert {(row.ours, row.agrees) for row in rows} == {(None, False)}
    assert all("the most tried" in row.instead for row in rows)


def test_both_systems_of_the_post_preprocess_images_by_one_process_of_a_server() -> None:
    for made in (vllm_blog.apart(), vllm_blog.monolith()):
        prepared = [
            row for kind in made.kinds.values() for profile in kind.profiles.values() for row in profile.prepare
        ]
        assert {row.seconds for row in prepared} == {process_s(vllm_blog.PROCESSOR)}
        assert {kind.prepare_cores for kind in made.kinds.values()} == {1}
