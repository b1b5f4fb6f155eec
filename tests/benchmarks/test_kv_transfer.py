from pathlib import Path

import pytest

from benchmarks.kv_transfer_steps import times_of
from benchmarks.timed_text import STEP, Happened
from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_handing_over_compares_transports_with_copies(tmp_path: Path) -> None:
    copies, *others = figures_of("kv_transfer", tmp_path, "--parts", "copies")["rows"]
    assert (copies["system"], copies["x_memcpy"]) == ("memcpy", 1.0)
    assert {row["system"] for row in others} >= {"shm", "tcp"}
    assert all(row["how"] in {"one by one", "pipelined"} and row["ms"] > 0 for row in others)


def test_it_times_the_steps_from_the_end_of_a_prompt_to_the_first_decode_step(tmp_path: Path) -> None:
    chunks, at_the_end = figures_of("kv_transfer", tmp_path, "--parts", "steps")["steps"]
    assert (chunks["how"], chunks["chunks"]) == ("chunks", 4)
    assert (at_the_end["how"], at_the_end["chunks"], at_the_end["sealed_early"]) == ("at the end", 1, 0.0)
    for row in (chunks, at_the_end):
        times = [row[f"{name}_ms"] for name in ("sealed", "kv_transferred", "decode", "token")]
        assert times == sorted(times)
        assert times[0] > 0
        assert row["kv_transferred_ms"] < row["arrived_ms"] < row["token_ms"], "noted when the event loop learns of it"


def test_what_is_sealed_before_the_last_chunk_ends_counts_as_early() -> None:
    sent = [
        Happened(STEP, 1.0, 1.2, 0),
        Happened("sealed", 1.3, 1.3, 300),
        Happened(STEP, 1.2, 1.5, 1),
        Happened("sealed", 1.6, 1.6, 100),
    ]
    taken = [
        Happened("pulled", 1.7, 1.7, 300),
        Happened("pulled", 1.75, 1.75, 100),
        Happened(STEP, 1.76, 1.77, 0),
        Happened(STEP, 1.8, 1.9, 1),
        Happened(STEP, 1.9, 1.95, 1),
    ]
    times = times_of(sent, taken, kv_transferred_s=1.65, token_s=1.92)
    assert (times.chunks, times.segments, times.nbytes, times.early_nbytes) == (2, 2, 400, 300)
    found = (times.prefill_s, times.sealed_s, times.kv_transferred_s, times.arrived_s, times.decode_s, times.token_s)
    assert found == pytest.approx((0.5, 0.1, 0.15, 0.25, 0.3, 0.42))
    assert times.step_s == pytest.approx(0.05)
