"""The choice of rows to measure, and how load levels are chosen: with a scripted engine; then all of it with a tiny model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.policy.profiles import DECODER
from triptych.domain.profile import DecodeRow, LoadRow
from triptych.domain.stage import Stage
from triptych.engine.profiling import EFFORTS, Latencies, Profiled, Task, main, measure_tables, search_load

EFFORT = replace(
    EFFORTS["quick"], load_batches=(1, 2, 4, 8), arrivals=5000, level_s=1e9, levels=(0.25, 0.5, 0.75), searches=3
)


class Scripted(Profiled):
    """Decode steps of 1 s per sequence up to 3. Under load, latencies grow with the load per batch limit up to 4."""

    tokens, output_tokens = 10, 5

    def __init__(self) -> None:
        self.measured: list[tuple[int, int]] = []
        self.served: list[tuple[int, float]] = []

    def tasks(self) -> list[Task]:
        places = [(batch, context) for batch in (1, 2, 4) for context in (1, 2, 3)]
        return [Task("decode", place, lambda place=place: self._row_s(*place), line=place[0]) for place in places]  # type: ignore[misc]

    def _row_s(self, batch: int, context: int) -> float | None:
        self.measured.append((batch, context))
        return None if batch * context > 7 else float(batch * context)

    def control_s(self) -> float:
        return 1.0

    def alone_s(self) -> Mapping[Stage, float]:
        return {Stage.ENCODE: 1.0}

    def serve(self, arrivals_s: Sequence[float], max_batch: int) -> Latencies:
        peak_per_s = float(min(max_batch, 4))
        if arrivals_s[-1] == 0:
            return Latencies({Stage.ENCODE: [1.0]}, peak_per_s)
        per_s = len(arrivals_s) / arrivals_s[-1]
        self.served.append((max_batch, per_s))
        return Latencies({Stage.ENCODE: [1.0 if per_s < 0.61 * peak_per_s else 99.0] * 3}, per_s)


def reports_of(kind: str, reports: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [report for report in reports if report["kind"] == kind]


def test_a_line_ends_after_a_row_that_takes_too_long_or_does_not_fit() -> None:
    scripted, reports = Scripted(), list[Mapping[str, Any]]()
    measure_tables(scripted, None, 3.5, reports.append)
    rows = [report["place"] for report in reports_of("row", reports)]
    assert rows == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (4, 1)]
    assert [report["place"] for report in reports_of("skipped", reports)] == [(2, 3), (4, 2), (4, 3)]
    assert scripted.measured == rows
    assert reports[0] == {"kind": "planned", "rows": 9}


def test_known_rows_are_not_measured_again() -> None:
    scripted, reports = Scripted(), list[Mapping[str, Any]]()
    known = replace(DECODER, prefill=(), decode=(DecodeRow(1, 2, 9.0), DecodeRow(2, 1, 0.1)))
    measure_tables(scripted, known, 3.5, reports.append)
    assert [report["place"] for report in reports_of("row", reports)] == [(1, 1), (2, 2), (4, 1)]
    assert (1, 3) not in scripted.measured  # the known row before it took too long


def test_the_search_narrows_down_the_load_and_stops_where_larger_batches_do_not_help() -> None:
    scripted, reports = Scripted(), list[Mapping[str, Any]]()
    search_load(scripted, None, EFFORT, 5.0, reports.append)
    (found,) = reports_of("found", reports)
    assert found["objectives"] == {"encode": 5.0}
    assert found["max_batch"] == 4
    assert found["tokens_per_s"] == pytest.approx(10 * 0.61 * 4, rel=0.05)
    assert {batch for batch, _ in scripted.served} == {1, 2, 4, 8}
    levels = [LoadRow(Stage(row[0]), *row[1:]) for row in (report["row"] for report in reports_of("load", reports))]
    assert all(
        level.p99_s == 1.0 for level in levels if level.max_batch == 4 and level.tokens_per_s < found["tokens_per_s"]
    )


def test_known_load_levels_are_used_again() -> None:
    first, reports = Scripted(), list[Mapping[str, Any]]()
    search_load(first, None, EFFORT, 5.0, reports.append)
    rows = tuple(LoadRow(Stage(row[0]), *row[1:]) for row in (report["row"] for report in reports_of("load", reports)))
    again, more = Scripted(), list[Mapping[str, Any]]()
    search_load(again, replace(DECODER, load=rows), EFFORT, 5.0, more.append)
    assert again.served == []
    assert more == reports_of("found", reports)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("part", "tables"), [("encoder", {"encode", "prepare"}), ("decoder", {"prefill", "decode"})])
def test_a_real_part_is_measured_from_start_to_end(
    model_dir: Path, capsys: pytest.CaptureFixture[str], part: str, tables: set[str]
) -> None:
    assert main(["--model", str(model_dir), "--part", part, "--effort", "quick", "--kv-cache-bytes", str(1 << 20)]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert reports[0]["kind"] == "ready"
    assert reports[0]["identity"]["part"] == part
    assert reports[0]["facts"]["weights_nbytes"] > 0
    assert {report["table"] for report in reports_of("row", reports)} == tables
    assert all(report["seconds"] > 0 for report in reports_of("row", reports))
    kinds = [report["kind"] for report in reports]
    assert 5 <= kinds.count("control") <= 6, "before, among and after the tables, and at the end"
    assert "control" in kinds[kinds.index("row") : len(kinds) - kinds[::-1].index("row")]
    assert reports_of("load", reports)
    assert reports_of("found", reports)


def test_a_directory_without_a_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path), "--part", "encoder"]) == 1
    assert "has no config.json" in capsys.readouterr().err
