import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.machine.free_runs import FreeRun, FreeRuns


def test_free_runs_merge_and_refuse_invalid_blocks() -> None:
    runs = FreeRuns(8)
    runs.take(2, 3)
    assert list(runs) == [FreeRun(0, 2), FreeRun(5, 3)]
    assert (3 in runs, 5 in runs) == (False, True)
    assert runs.give(3) == FreeRun(3, 1)
    assert runs.give(2) == FreeRun(0, 4)
    assert runs.give(4) == FreeRun(0, 8)
    assert runs.take_any() == 7
    for wrong in (lambda: runs.give(0), lambda: runs.take(6, 2), lambda: runs.give(8), lambda: runs.give(-1)):
        with pytest.raises(ValueError, match="not"):
            wrong()
    runs.validate()


def test_single_blocks_are_taken_from_the_end() -> None:
    runs = FreeRuns(6)
    runs.take(2, 2)
    assert [runs.take_any() for _ in range(4)] == [5, 4, 1, 0]
    runs.validate()
    assert (runs.free, list(runs)) == (0, [])
    with pytest.raises(ValueError, match="no block is free"):
        runs.take_any()


def test_fitting_runs_come_shortest_first() -> None:
    runs = FreeRuns(12)
    for block in (2, 5, 8):
        runs.take(block, 1)
    assert list(runs) == [FreeRun(0, 2), FreeRun(3, 2), FreeRun(6, 2), FreeRun(9, 3)]
    assert list(runs.fitting(2)) == list(runs)
    assert list(runs.fitting(3)) == [FreeRun(9, 3)]
    runs.give(5)
    assert list(runs.fitting(2)) == [FreeRun(0, 2), FreeRun(9, 3), FreeRun(3, 5)]
    assert list(runs.fitting(6)) == []
    assert (runs.get(3), runs.get(4)) == (FreeRun(3, 5), None)


def test_an_empty_pool_has_nothing_to_take() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        FreeRuns(0)
    with pytest.raises(ValueError, match="are not free"):
        FreeRuns(4).take(2, 0)


@given(blocks=st.integers(1, 20), rng=st.randoms(use_true_random=False))
def test_free_blocks_are_those_not_taken(blocks: int, rng: random.Random) -> None:
    runs, free = FreeRuns(blocks), set(range(blocks))
    for _ in range(40):
        block = rng.randrange(blocks)
        if block in free:
            end = next(position for position in range(block, blocks + 1) if position not in free)
            count = rng.randint(1, end - block)
            runs.take(block, count)
            free -= set(range(block, block + count))
        else:
            runs.give(block)
            free.add(block)
        runs.validate()
        assert {block for run in runs for block in range(run.start, run.end)} == free
        assert runs.free == len(free)
