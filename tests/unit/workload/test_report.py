import io
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from rich.table import Table

from triptych.cli.bench.show import not_kept_up, plot, run_table, sweep_table
from triptych.cli.show import plain_console
from triptych.workload.report import NOT_SENT, Objectives, Record, Report, Run, goodput, percentile, summarize
from triptych.workload.requests import Planned, Size

GOOD = Record(Planned(0, 8, (), 11), ttft_s=0.2, end_s=1.2, prompt_tokens=9, tokens=11)
LATE = replace(GOOD, ttft_s=0.9, end_s=1.9)
SLOW = replace(GOOD, end_s=4.2)
FAILED = replace(GOOD, ttft_s=None, tokens=0, error="HTTP 429")


def test_time_per_token_starts_at_the_first() -> None:
    assert GOOD.tpot_s == pytest.approx(0.1)
    assert replace(GOOD, tokens=1).tpot_s is None
    assert FAILED.tpot_s is None


def test_failures_are_counted_by_kind_and_miss_their_slo() -> None:
    records = [GOOD, LATE, SLOW, FAILED, FAILED, replace(FAILED, error="timeout"), GOOD, GOOD]
    report = summarize(records, Objectives(ttft_s=0.5, tpot_s=0.15), 2.0)
    assert (report.requests, report.answered) == (8, 5)
    assert report.errors == {"HTTP 429": 2, "timeout": 1}
    assert report.attainment == 3 / 8
    assert report.output_tokens == 55
    assert report.ttft.p50_s == 0.2


@pytest.mark.parametrize(
    ("errors", "failed"),
    [
        (["", "HTTP 429", "HTTP 504", "timeout"], 0),
        (["cannot connect", "connection broke", "broke off", "HTTP 429"], 3),
        ([NOT_SENT, "HTTP 503", "error in the stream: a text instance was lost"], 3),
    ],
)
def test_refusals_and_timeouts_are_results_and_what_could_not_be_sent_or_broke_has_failed(
    errors: list[str], failed: int
) -> None:
    assert summarize([replace(GOOD, error=error) for error in errors], Objectives(), 1.0).failed == failed


def test_without_an_slo_there_is_no_attainment() -> None:
    report = summarize([GOOD], Objectives(), 1.0)
    assert report.attainment is None
    assert goodput([report], 0.9) is None


def test_a_run_in_which_all_requests_failed_is_reported() -> None:
    report = summarize([FAILED, FAILED], Objectives(ttft_s=1), 2.0)
    assert (report.answered, report.attainment, report.ttft.p99_s) == (0, 0.0, None)
    plain_console(stderr=True).print(run_table(report), sweep_table([report]))


def test_goodput_is_the_highest_rate_with_enough_attainment() -> None:
    def attained(rate: float, share: float, late_s: float = 0.0) -> Report:
        record = replace(GOOD, sent_late_s=late_s)
        return replace(summarize([record], Objectives(ttft_s=1), rate), attainment=share)

    reports = [attained(1.0, 1.0), attained(2.0, 0.92), attained(4.0, 0.91), attained(8.0, 0.5)]
    assert goodput(reports, 0.9) == 4.0
    assert goodput(reports, 0.95) == 1.0
    assert goodput(reports[3:], 0.9) == 0.0
    assert goodput([*reports, attained(16.0, 1.0, late_s=17.0)], 0.9) == 4.0, "a rate that was not offered"
    seeds = [attained(6.0, 0.7), attained(6.0, 1.0), attained(5.0, 0.82), attained(5.0, 1.0)]
    assert goodput([*reports, *seeds], 0.9) == 5.0, "on average over the runs of a rate"
    assert goodput([*seeds, attained(5.0, 1.0, late_s=17.0)], 0.9) == 0.0


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (replace(GOOD, sent_late_s=17.0), "1 in 100 was sent more than 17.00 s late"),
        (replace(FAILED, error=NOT_SENT), "2 requests were not sent"),
    ],
)
def test_a_generator_that_cannot_keep_up_marks_its_figures(record: Record, said: str) -> None:
    report = summarize([record, record], Objectives(), 61.0)
    assert not report.kept_up
    assert report.document()["kept_up"] is False
    assert said in (not_kept_up(report) or "")
    for table in (run_table(report), sweep_table([report])):
        assert "61*" in shown(table)
    on_time = summarize([GOOD], Objectives(), 61.0)
    assert (on_time.kept_up, not_kept_up(on_time)) == (True, None)
    assert "61*" not in shown(run_table(on_time))


def shown(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_lie_within_their_values(values: list[float], q: int) -> None:
    got = percentile(values, q)
    assert min(values) <= got <= max(values)
    assert percentile(list(reversed(values)), q) == got


def test_percentiles_are_interpolated() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile(range(101), 99) == 99


@pytest.mark.slow  # matplotlib asks a program for the machine's fonts the first time
@pytest.mark.parametrize("rates", [(2.0,), (1.0, 2.0)])
def test_plots_are_png_files(tmp_path: Path, rates: tuple[float, ...]) -> None:
    rng = random.Random(0)
    records = [replace(GOOD, ttft_s=rng.random(), end_s=2 + rng.random()) for _ in range(20)] + [FAILED]
    objectives = Objectives(ttft_s=0.5)
    runs = [Run(rate, summarize(records, objectives, rate), records) for rate in rates]
    plot(tmp_path / "a.png", runs, objectives)
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"


def test_kinds_of_requests_are_reported_apart_where_there_are_several() -> None:
    pictured = replace(LATE, planned=Planned(0, 8, (Size(9, 9),), 11))
    report = summarize([GOOD, GOOD, pictured, replace(FAILED, planned=pictured.planned)], Objectives(0.5), rate=1.0)
    assert list(report.by_kind) == ["text", "image"]
    text, image = report.by_kind["text"], report.by_kind["image"]
    assert (text.requests, text.answered, text.attainment, text.ttft.p50_s) == (2, 2, 1.0, 0.2)
    assert (image.requests, image.answered, image.attainment, image.ttft.p50_s) == (2, 1, 0.0, 0.9)
    assert not summarize([GOOD, LATE], Objectives(0.5), rate=1.0).by_kind
