"""Traces in their published formats; with TRIPTYCH_TEST_TRACES also the published files."""

import csv
import gzip
import json
import math
import os
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.workload.recorded import clip_of, line_of, parsed, seconds_of, size_of
from triptych.workload.requests import Clip, Planned, Size, WorkloadError
from triptych.workload.traces import Span, load

AZURE = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-15T12:00:05.819Z,1,949,126
2024-10-15T12:00:07.819Z,0,500,80
2024-10-15T12:00:15.819Z,2,700,0
"""
PART = {
    "text_tokens": "{10: 0.5, 20: 0.5}",
    "image_tokens": "{4: 1.0}",
    "image_count": "{0: 0.5, 3: 0.5}",
    "output_tokens": "{7: 1.0, 8: 8.1e-05}",
}


def servegen(directory: Path, *, rows: str, dataset: object = None) -> Path:
    (directory / "chunk-0-trace.csv").write_text(rows)
    document = {"0": PART, "21600": {**PART, "text_tokens": "{99: 1.0}"}} if dataset is None else dataset
    (directory / "chunk-0-dataset.json").write_text(json.dumps(document))
    return directory


@pytest.mark.parametrize("zipped", [False, True])
def test_the_azure_trace_is_replayed_as_recorded(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / ("trace.csv.gz" if zipped else "trace.csv")
    path.write_bytes(gzip.compress(AZURE.encode()) if zipped else AZURE.encode())
    got = load(path, Span(0, 60), Size(28, 28), random.Random(0))
    assert [(round(r.arrival_s, 6), len(r.images), r.text_tokens, r.output_tokens) for r in got.requests] == [
        (0, 1, 948, 126),
        (2, 0, 500, 80),
        (10, 2, 698, 1),
    ]


def test_part_of_a_trace_can_be_replayed_faster(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    got = load(path, Span(1, 4, rate=0.25), None, random.Random(0))
    assert [round(request.arrival_s, 6) for request in got.requests] == [pytest.approx(4 / 9, abs=1e-5)]
    assert (got.duration_s, got.rate) == (4.0, 0.25)


def test_a_trace_shorter_than_the_duration_keeps_the_requested_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    got = load(path, Span(0, 60, rate=0.5), None, random.Random(0))
    assert (len(got.requests), got.duration_s, got.rate) == (3, 6.0, 0.5)
    assert [request.arrival_s for request in got.requests] == pytest.approx([0, 0.9, 4.5])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "lacks the columns TIMESTAMP"),
        (AZURE.replace("500", "many"), "line 3"),
        (AZURE.replace("2024-10-15T12:00:07.819Z", "noon"), "line 3"),
        (AZURE.splitlines()[0], "has no request"),
        ("", "lacks the columns"),
    ],
)
def test_a_malformed_azure_trace_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=said):
        load(path, Span(0, 60), None, random.Random(0))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(b"not gzip")
    with pytest.raises(WorkloadError, match=r"trace\.csv\.gz"):
        load(path, Span(0, 60), None, random.Random(0))


RECORDED = (
    '{"arrival_s": 2.5, "text_tokens": 7, "output_tokens": 0, "outcome": "failed"}\n'
    '{"arrival_s": 0.5, "text_tokens": 9, "output_tokens": 3, "images": ["8x6", "20x10"], "tenant": "tenant-1"}\n\n'
    '{"arrival_s": 9, "text_tokens": 1, "output_tokens": 1, "videos": [{"size": "4x4", "seconds": 2, "frames_per_s": 5}],'
    ' "sounds_s": [1.5]}\n'
)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_recording_is_replayed_by_arrival(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / ("a.jsonl.gz" if zipped else "a.jsonl")
    path.write_bytes(gzip.compress(RECORDED.encode()) if zipped else RECORDED.encode())
    got = load(path, Span(0, 60), None, random.Random(0)).requests
    assert got == [
        Planned(0.5, 9, (Size(8, 6), Size(20, 10)), 3, tenant="tenant-1"),
        Planned(2.5, 7, (), 1),
        Planned(9.0, 1, (), 1, videos=(Clip(Size(4, 4), 2.0, 5),), sounds_s=(1.5,)),
    ]
    [later] = load(path, Span(2, 5), None, random.Random(0)).requests
    assert later == Planned(0.5, 7, (), 1)
    sized = load(path, Span(0, 60), Size(2, 2), random.Random(0)).requests
    assert sized[0].images == (Size(2, 2),) * 2
    assert load(path, Span(0, 60, rate=0.5), None, random.Random(0)).rate == 0.5


def test_a_recording_has_an_end_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(RECORDED)
    got = load(path, Span(0, math.inf), None, random.Random(0))
    assert [request.arrival_s for request in got.requests] == [0.5, 2.5, 9.0]
    assert got.duration_s == 12.0, "another mean gap"
    later = load(path, Span(2, math.inf), None, random.Random(0))
    assert ([request.arrival_s for request in later.requests], later.duration_s) == ([0.5, 7.0], 10.5)
    faster = load(path, Span(0, math.inf, rate=1.0), None, random.Random(0))
    assert ([request.arrival_s for request in faster.requests], faster.rate) == ([0.125, 0.625, 2.25], 1.0)
    with pytest.raises(WorkloadError, match="has no request after 99 s"):
        load(path, Span(99, math.inf), None, random.Random(0))
    path.write_text(RECORDED.splitlines()[1].replace("0.5", "0"))
    assert load(path, Span(0, math.inf), None, random.Random(0)).requests[0].arrival_s == 0


@given(
    st.builds(
        Planned,
        arrival_s=st.floats(0, 1e6).map(lambda at_s: round(at_s, 6)),
        text_tokens=st.integers(0, 1000),
        images=st.lists(st.builds(size_of, st.integers(-5, 99_999), st.integers(-5, 99_999)), max_size=3).map(tuple),
        output_tokens=st.integers(1, 1000),
        videos=st.lists(
            st.builds(
                clip_of,
                st.builds(size_of, st.integers(0, 99), st.integers(0, 99)),
                st.floats(0, 1e5).map(lambda seconds: round(seconds, 3)),
                st.integers(0, 10**6),
            ),
            max_size=2,
        ).map(tuple),
        sounds_s=st.lists(st.floats(0, 1e5).map(lambda seconds: seconds_of(round(seconds, 3))), max_size=2).map(tuple),
        tenant=st.sampled_from(["", "tenant-7"]),
    )
)
def test_what_is_recorded_is_what_is_replayed(planned: Planned) -> None:
    assert list(parsed("a", [line_of(planned, "done")])) == [planned]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2"),
        ("{}", "arrival_s is missing"),
        ('{"arrival_s": -1, "text_tokens": 1, "output_tokens": 1}', "arrival_s is not a number from 0"),
        ('{"arrival_s": NaN, "text_tokens": 1, "output_tokens": 1}', "arrival_s is not a number from 0"),
        ('{"arrival_s": 1, "text_tokens": 1.5, "output_tokens": 1}', "text_tokens is not a whole number"),
        ('{"arrival_s": 1, "text_tokens": 1, "output_tokens": true}', "output_tokens is not a whole number"),
        ('{"arrival_s": 1, "text_tokens": 1, "output_tokens": 1, "images": "8x8"}', "images is not a list"),
        ('{"arrival_s": 1, "text_tokens": 1, "output_tokens": 1, "images": ["8"]}', "is not a size"),
        ('{"arrival_s": 1, "text_tokens": 1, "output_tokens": 1, "images": [8]}', "line 2"),
        ('{"arrival_s": 1, "text_tokens": 1, "output_tokens": 1, "videos": [{}]}', "line 2: size is missing"),
        ('{"arrival_s": 1, "text_tokens": 1, "output_tokens": 1, "sounds_s": [0]}', "sounds_s is not a number"),
    ],
)
def test_a_malformed_recording_is_refused_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(RECORDED.splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(WorkloadError, match=re.escape(said)):
        load(path, Span(0, 60), None, random.Random(0))


@pytest.mark.parametrize("window", ["0,5,1,Gamma,1,0.2", "0,5,2,Weibull,0.6,0.1329"])
def test_servegen_profiles_are_sampled_at_their_rates(tmp_path: Path, window: str) -> None:
    path = servegen(tmp_path, rows=f"{window}\n600,0,0,,0,0\n")
    got = load(path, Span(0, 1200), None, random.Random(0))
    assert len(got.requests) / 600 == pytest.approx(5, rel=0.1)
    assert all(0 <= request.arrival_s < 600 for request in got.requests), "the second window is empty"
    assert {request.text_tokens for request in got.requests} == {10, 20}
    assert {request.images for request in got.requests} == {(), (Size(56, 56),) * 3}
    assert {request.output_tokens for request in got.requests} == {7}


@pytest.mark.parametrize("fit", ["Gamma,1,0.00058", "Gamma,0.0127,0.1", "Weibull,0.36,3.9", "Weibull,1,1e-9"])
@pytest.mark.slow
def test_the_recorded_rate_overrides_the_fitted_gaps(tmp_path: Path, fit: str) -> None:
    path = servegen(tmp_path, rows=f"0,5,1,{fit}\n")
    recorded = [len(_loaded(path, Span(100, 20), seed)) for seed in range(300)]
    assert sum(recorded) / len(recorded) == pytest.approx(100, rel=0.15)
    asked = [len(_loaded(path, Span(100, 20, rate=2), seed)) for seed in range(600)]
    assert sum(asked) / len(asked) == pytest.approx(40, rel=0.15)


def test_short_runs_of_bursty_profiles_keep_the_requested_rate(tmp_path: Path) -> None:
    path = servegen(tmp_path, rows="0,5,2,Weibull,0.6,0.1329\n")
    counts = [len(_loaded(path, Span(100, 20, rate=1), seed)) for seed in range(200)]
    assert sum(counts) / len(counts) == pytest.approx(20, rel=0.1)


def test_a_client_has_the_same_draws_at_every_rate(tmp_path: Path) -> None:
    path = servegen(tmp_path, rows="0,5,2,Weibull,0.6,0.1329\n600,5,1,Gamma,1,0.2\n")
    recorded, fast = (load(path, Span(0, 300, rate=rate), None, random.Random(4)) for rate in (5, 10))
    assert len(fast.requests) > 1.5 * len(recorded.requests) > 1500
    for late, early in zip(recorded.requests, fast.requests, strict=False):
        assert replace(late, arrival_s=0.0) == replace(early, arrival_s=0.0)
        assert late.arrival_s == pytest.approx(2 * early.arrival_s)
    sized = load(path, Span(0, 300, rate=5), Size(8, 8), random.Random(4))
    assert [request.output_tokens for request in sized.requests] == [
        request.output_tokens for request in recorded.requests
    ]


def _loaded(path: Path, span: Span, seed: int) -> list[object]:
    try:
        return list(load(path, span, None, random.Random(seed)).requests)
    except WorkloadError:
        return []


def test_request_sizes_follow_the_time_of_day(tmp_path: Path) -> None:
    path = servegen(tmp_path, rows="21600,5,1,Gamma,1,0.2\n")
    got = load(path, Span(21600, 60), Size(8, 8), random.Random(0))
    assert {request.text_tokens for request in got.requests} == {99}
    assert {size for request in got.requests for size in request.images} == {Size(8, 8)}


@pytest.mark.parametrize(
    ("rows", "dataset"),
    [
        ("0,5,1,Gauss,1,1\n", None),
        ("0,5,1,Gamma,0,1\n", None),
        ("0,5,1,Weibull,0.001,1\n", None),
        ("0,5\n", None),
        ("", None),
        ("0,5,1,Gamma,1,0.2\n", {}),
        ("0,5,1,Gamma,1,0.2\n", []),
        ("0,5,1,Gamma,1,0.2\n", {"0": {}}),
        ("0,5,1,Gamma,1,0.2\n", {"0": {**PART, "text_tokens": "{}"}}),
    ],
)
def test_a_malformed_servegen_workload_is_refused(tmp_path: Path, rows: str, dataset: object) -> None:
    with pytest.raises(WorkloadError):
        load(servegen(tmp_path, rows=rows, dataset=dataset), Span(0, 60), None, random.Random(0))


def test_a_directory_without_profiles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="not a ServeGen workload"):
        load(tmp_path, Span(0, 60), None, random.Random(0))


def test_the_published_workload_matches_its_published_statistics() -> None:
    path = _published()
    day = [load(path, Span(hour * 3600, 600), None, random.Random(hour)) for hour in range(24)]
    images = [len(request.images) for part in day for request in part.requests]
    assert sum(images) / len(images) == pytest.approx(1.6, abs=0.4)
    assert images.count(0) / len(images) < 0.02
    recorded = 0.0
    for file in path.glob("chunk-*-trace.csv"):
        with file.open(newline="") as rows:
            recorded += sum(float(row[1]) for row in csv.reader(rows) if float(row[0]) % 3600 == 0)
    assert len(images) / 600 == pytest.approx(recorded, rel=0.05), "requests per second, over all clients"


@pytest.mark.parametrize("start_s", [0, 6000, 12_000, 36_000, 63_000])
def test_the_published_workload_is_offered_at_the_requested_rate(start_s: float) -> None:
    """At 6000 s a client's fitted gaps are 30,000 times too short for its recorded rate."""
    path = _published()
    plans = [load(path, Span(start_s, 300, rate=4), None, random.Random(seed)) for seed in range(10)]
    assert sum(plan.rate for plan in plans) / len(plans) == pytest.approx(4, rel=0.2)
    assert [plan.rate for plan in plans] == [len(plan.requests) / 300 for plan in plans]


def _published() -> Path:
    root = os.environ.get("TRIPTYCH_TEST_TRACES")  # noqa: TID251  # where a machine has them is not the project's to say
    if not root:
        pytest.skip("TRIPTYCH_TEST_TRACES does not name a directory with servegen-mm-image/")
    return Path(root) / "servegen-mm-image"
