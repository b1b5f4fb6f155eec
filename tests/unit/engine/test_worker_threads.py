import threading

import pytest
import torch

from triptych.engine.worker_threads import WorkerThreads


@pytest.mark.parametrize(
    ("threads", "of_torch", "worthwhile", "used"), [(4, 3, 9, 3), (2, 3, 9, 2), (4, 3, 2, 2), (4, 3, 0, 1)]
)
def test_as_many_are_used_as_there_are_and_as_are_worthwhile(
    threads: int, of_torch: int, worthwhile: int, used: int
) -> None:
    torch.set_num_threads(of_torch)
    try:
        assert WorkerThreads(threads).usable(worthwhile) == used
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ends", [[0, 5], [0, 2, 2, 7], [0, 1, 2, 3], [0, 0]])
def test_each_part_runs_once(threads: int, ends: list[int]) -> None:
    done: list[tuple[int, int]] = []
    WorkerThreads(threads).run(lambda begin, end: done.append((begin, end)), ends)
    assert sorted(at for begin, end in done for at in range(begin, end)) == list(range(ends[-1]))


def test_parts_run_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=60)

    def part(begin: int, end: int) -> None:
        together.wait()

    WorkerThreads(3).run(part, [0, 1, 2, 3])


def test_an_error_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []

    def part(begin: int, end: int) -> None:
        if begin == 1:
            raise ValueError("bad part")
        ended.append(begin)

    with pytest.raises(ValueError, match="bad part"):
        WorkerThreads(3).run(part, [0, 1, 2, 3])
    assert sorted(ended) == [0, 2]
