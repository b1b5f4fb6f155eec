import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from triptych.cli.bench.load import Record
from triptych.cli.bench.report import Objectives, Report, goodput, percentile, summarize
from triptych.cli.bench.show import plot, run_table, sweep_table
from triptych.cli.bench.workload import Planned
from triptych.cli.show import plain_console

GOOD = Record(Planned(0, 8, (), 11), ttft_s=0.2, end_s=1.2, prompt_tokens=9, tokens=11)
LATE = replace(GOOD, ttft_s=0.9, end_s=1.9)
SLOW = replace(GOOD, end_s=4.2)
FAILED = replace(GOOD, ttft_s=None, tokens=0, error="HTTP 429")


def test_time_per_token_starts_at_the_first() -> None:
    assert GOOD.tpot_s == pytest.approx(0.1)
    assert replace(GOOD, tokens=1).tpot_s is None
    assert FAILED.tpot_s is None


def test_failures_are_counted_by_kind_and_miss_their_objectives() -> None:
    records = [GOOD, LATE, SLOW, FAILED, FAILED, replace(FAILED, error="timeout"), GOOD, GOOD]
    report = summarize(records, Objectives(ttft_s=0.5, tpot_s=0.15))
    assert (report.requests, report.answered) == (8, 5)
    assert report.errors == {"HTTP 429": 2, "timeout": 1}
    assert report.attainment == 3 / 8
    assert report.output_tokens == 55
    assert report.ttft.p50_s == 0.2


def test_without_objectives_there_is_no_attainment() -> None:
    report = summarize([GOOD], Objectives())
    assert report.attainment is None
    assert goodput([(1.0, report)], 0.9) is None


def test_a_run_in_which_all_failed_is_still_a_report() -> None:
    report = summarize([FAILED, FAILED], Objectives(ttft_s=1))
    assert (report.answered, report.attainment, report.ttft.p99_s) == (0, 0.0, None)
    plain_console(stderr=True).print(run_table(report), sweep_table([(2.0, report)]))


def test_goodput_is_the_highest_rate_that_attains() -> None:
    def attained(share: float) -> Report:
        return replace(summarize([GOOD], Objectives(ttft_s=1)), attainment=share)

    runs = [(1.0, attained(1.0)), (2.0, attained(0.92)), (4.0, attained(0.91)), (8.0, attained(0.5))]
    assert goodput(runs, 0.9) == 4.0
    assert goodput(runs, 0.95) == 1.0
    assert goodput(runs[3:], 0.9) == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_lie_within_their_values(values: list[float], q: int) -> None:
    got = percentile(values, q)
    assert min(values) <= got <= max(values)
    assert percentile(list(reversed(values)), q) == got


def test_percentiles_are_interpolated() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile(range(101), 99) == 99


@pytest.mark.parametrize("rates", [(2.0,), (1.0, 2.0)])
def test_plots_are_pictures(tmp_path: Path, rates: tuple[float, ...]) -> None:
    rng = random.Random(0)
    records = [replace(GOOD, ttft_s=rng.random(), end_s=2 + rng.random()) for _ in range(20)] + [FAILED]
    objectives = Objectives(ttft_s=0.5)
    report = summarize(records, objectives)
    plot(tmp_path / "a.png", [(rate, report, records) for rate in rates], objectives)
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"
