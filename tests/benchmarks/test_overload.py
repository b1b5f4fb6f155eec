from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_benchmark_of_overload_refuses_and_loses_no_request(tmp_path: Path) -> None:
    (run,) = figures_of("overload", tmp_path, "--busy", "1")["runs"]
    calm, crowded = run["rows"]
    assert run["busy"] == 1
    assert run["capacity"] > 0
    assert (calm["broken"], crowded["broken"]) == (0, 0)
    for row in (calm, crowded):
        assert set(row["statuses"]) <= {"200", "429", "504"}
        assert row["answered_in_time"] + row["refused"] + row["late"] == row["sent"]
        assert row["encoded_in_vain"] >= 0
        assert row["overdue_answers"] <= row["overdue"] <= row["late"] + row["refused"]
        assert row["unread"] <= row["refused"]
        assert row["again"] is None
    assert crowded["refused"] > 0
    assert crowded["answered_in_time"] > 0


def test_it_tells_what_becomes_of_clients_that_wait_their_retry_after(tmp_path: Path) -> None:
    given = ("--come-back", "--deadlines", "0.5-1,3-5")
    runs = figures_of("overload", tmp_path, *given)["runs"]
    assert [run["deadlines_s"] for run in runs] == [[0.5, 1.0], [3.0, 5.0]]
    short, long = (run["rows"][-1]["again"] for run in runs)
    assert short["tries"] > 0
    assert short["retry_after_p50_s"] >= 1
    for again in (short, long):
        assert again["answered_in_time"] <= again["admitted"] <= again["tries"]
        assert again["unread_admitted"] <= again["unread"] <= again["tries"]
        assert again["left"] >= 0
