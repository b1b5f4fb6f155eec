import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine.kv import KvCache, KvShape

SHAPE = KvShape(layers=2, heads=3, head_size=5, dtype=torch.float16)


def cache(slots: int) -> KvCache:
    return KvCache(SHAPE, nbytes=slots * SHAPE.slot_nbytes, device=torch.device("cpu"))


def test_memory_is_bounded_in_bytes() -> None:
    kv = cache(10)
    assert kv.slots == 10
    assert kv.keys.nbytes + kv.values.nbytes == 10 * SHAPE.slot_nbytes
    with pytest.raises(ValueError, match="holds no token"):
        KvCache(SHAPE, nbytes=SHAPE.slot_nbytes - 1, device=torch.device("cpu"))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_runs_never_overlap_and_come_back_whole(operations: list[tuple[bool, int]]) -> None:
    kv = cache(32)
    taken: dict[int, int] = {}
    for give, size in operations:
        if give and taken:
            first = sorted(taken)[size % len(taken)]
            del taken[first]
            kv.give(first)
        else:
            fits = size <= kv.largest_run
            start = kv.take(size)
            assert (start is not None) == fits
            if start is not None:
                assert 0 <= start <= 32 - size
                assert all(start + size <= other or other + length <= start for other, length in taken.items())
                taken[start] = size
        assert kv.free_slots == 32 - sum(taken.values())
    for first in taken:
        kv.give(first)
    assert kv.take(32) == 0
