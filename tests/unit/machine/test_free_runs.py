import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.machine.free_runs import FreeRun, FreeRuns


def test_free_runs_join_and_refuse_what_is_not_theirs() -> None:
    runs = FreeRuns(8)
    runs.take(2, 3)
    assert list(runs) == [FreeRun(0, 2), FreeRun(5, 3)]
    assert (3 in runs, 5 in runs) == (False, True)
    assert runs.give(3) == FreeRun(3, 1)
    assert runs.give(2) == FreeRun(0, 4)
    assert runs.give(4) == FreeRun(0, 8)
    assert runs.take_any() == 7
    for wrong in (lambda: runs.give(0), lambda: runs.take(6, 2), lambda: runs.give(8)):
        with pytest.raises(ValueError, match="not"):
            wrong()
    runs.validate()


@given(blocks=st.integers(1, 20), chance=st.randoms(use_true_random=False))
def test_what_is_free_is_what_was_not_taken(blocks: int, chance: random.Random) -> None:
    runs, free = FreeRuns(blocks), set(range(blocks))
    for _ in range(40):
        block = chance.randrange(blocks)
        if block in free:
            end = next(one for one in range(block, blocks + 1) if one not in free)
            count = chance.randint(1, end - block)
            runs.take(block, count)
            free -= set(range(block, block + count))
        else:
            runs.give(block)
            free.add(block)
        runs.validate()
        assert {block for run in runs for block in range(run.start, run.end)} == free
        assert runs.free == len(free)
