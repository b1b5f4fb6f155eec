from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from triptych.domain.embedding import DType
from triptych.domain.kv_segment import KvKind, KvSegment
from triptych.engine.decoder import kv_cache
from triptych.engine.decoder.kv_cache import KvCache
from triptych.machine.text.kv_blocks import Copy

KIND = KvKind("model", DType.F16, layers=2, heads=3, head_size=5)


def cache(blocks: int, block_tokens: int = 4, kind: KvKind = KIND) -> KvCache:
    nbytes = blocks * block_tokens * kind.position_nbytes
    return KvCache(kind, nbytes=nbytes, block_tokens=block_tokens, device=torch.device("cpu"))


def test_memory_is_bounded_in_bytes() -> None:
    kv = cache(10)
    assert kv.blocks == 10
    assert kv.keys.nbytes + kv.values.nbytes == 40 * KIND.position_nbytes
    with pytest.raises(ValueError, match="holds no block"):
        KvCache(KIND, nbytes=4 * KIND.position_nbytes - 1, block_tokens=4, device=torch.device("cpu"))


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


layouts = st.tuples(st.sampled_from((1, 3, 16, 48, 256)), st.booleans(), st.randoms(use_true_random=False))


@settings(deadline=None, max_examples=examples(40))
@given(
    source=layouts,
    target=layouts,
    cuts=st.lists(st.integers(0, 300), min_size=2, max_size=5, unique=True).map(sorted),
    skipped=st.integers(0, 40),
    on_host=st.booleans(),
)
def test_positions_survive_export_and_load_into_other_blocks(
    source: tuple[int, bool, Random], target: tuple[int, bool, Random], cuts: list[int], skipped: int, on_host: bool
) -> None:
    """In pieces; nothing else is written, and of the first piece not what is there already. With the code for GPUs as well."""
    (own, table), (other, other_table) = filled(source), filled(target)
    slots, other_slots = own.slots(table, 0, 300), other.slots(other_table, 0, 300)
    before = [memory.clone() for memory in (other.keys, other.values)]
    first = min(cuts[0] + skipped, cuts[1])
    with patch.object(kv_cache, "_is_on_host", return_value=on_host):
        for begin, end in pairwise(cuts):
            memory = torch.zeros((end - begin) * KIND.position_nbytes + 64, dtype=torch.uint8)
            segment = own.export(table, begin, end, memory)
            assert (segment.first, segment.end, segment.nbytes) == (begin, end, len(memory) - 64)
            assert not memory[segment.nbytes :].any()
            other.load(other_table, segment, memory, first=max(begin, first))
    for mine, theirs, was in zip((own.keys, own.values), (other.keys, other.values), before, strict=True):
        was[:, other_slots[first : cuts[-1]]] = mine[:, slots[first : cuts[-1]]]
        assert torch.equal(theirs, was)


def filled(layout: tuple[int, bool, Random]) -> tuple[KvCache, list[int]]:
    """A cache with random contents, and the blocks of a sequence of 300 tokens."""
    block_tokens, contiguous, rng = layout
    wanted = -(-300 // block_tokens)
    kv = cache(wanted + 3, block_tokens)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    for memory in (kv.keys, kv.values):
        memory.copy_(torch.randn(memory.shape, generator=generator))
    table = list(range(1, wanted + 1)) if contiguous else rng.sample(range(wanted + 3), wanted)
    return kv, table


@pytest.mark.parametrize(
    "changes", [{"model_revision": "another"}, {"dtype": DType.BF16}, {"heads": 5, "head_size": 3}]
)
def test_keys_and_values_of_another_kind_are_refused(changes: dict[str, Any]) -> None:
    memory = torch.zeros(4 * KIND.position_nbytes, dtype=torch.uint8)
    segment = cache(2, kind=replace(KIND, **changes)).export([0], 0, 4, memory)
    assert segment.nbytes == len(memory)
    with pytest.raises(ValueError, match="another" if "model_revision" in changes else "kind"):
        cache(2).load([0], segment, memory, first=0)


@pytest.mark.parametrize(("first", "blocks"), [(3, 3), (11, 3), (5, 2)])
def test_positions_that_are_not_in_the_segment_or_beyond_the_blocks_are_refused(first: int, blocks: int) -> None:
    segment = KvSegment(KIND, 4, 6)
    with pytest.raises(ValueError, match=rf"positions 4 to 10, from {first} on, do not fit {blocks} blocks of 4"):
        cache(4).load(range(blocks), segment, torch.zeros(segment.nbytes, dtype=torch.uint8), first=first)
