import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine.decoder.kv_cache import KvCache, KvShape
from triptych.machine.text.kv_blocks import Copy

SHAPE = KvShape(layers=2, heads=3, head_size=5, dtype=torch.float16)


def cache(blocks: int, block_tokens: int = 4) -> KvCache:
    nbytes = blocks * block_tokens * SHAPE.slot_nbytes
    return KvCache(SHAPE, nbytes=nbytes, block_tokens=block_tokens, device=torch.device("cpu"))


def test_memory_is_bounded_in_bytes() -> None:
    kv = cache(10)
    assert kv.blocks == 10
    assert kv.keys.nbytes + kv.values.nbytes == 40 * SHAPE.slot_nbytes
    with pytest.raises(ValueError, match="holds no block"):
        KvCache(SHAPE, nbytes=4 * SHAPE.slot_nbytes - 1, block_tokens=4, device=torch.device("cpu"))


def test_slots_follow_the_block_table() -> None:
    assert cache(10).slots([5, 2, 9], 3, 9) == [23, 8, 9, 10, 11, 36]
    assert cache(10).slots([5, 2, 9], 4, 4) == []


blocks = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)


@given(st.lists(st.tuples(blocks, blocks), max_size=6))
def test_copies_are_made_in_order(pairs: list[tuple[list[int], list[int]]]) -> None:
    kv = cache(10)
    for memory in (kv.keys, kv.values):
        memory.copy_(torch.arange(40)[None, :, None, None].expand_as(memory))
    expected = list(range(10))
    copies = [Copy(tuple(a[: len(b)]), tuple(b[: len(a)])) for a, b in pairs if set(a).isdisjoint(b)]
    for source, target in copies:
        for before, after in zip(source, target, strict=True):
            expected[after] = expected[before]
    kv.copy(copies)
    slots = [4 * block + at for block in expected for at in range(4)]
    for memory in (kv.keys, kv.values):
        assert memory[1, :, 2, 3].int().tolist() == slots
