from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.embedding import DType
from triptych.domain.kv_segment import KvKind, KvSegment
from triptych.machine.text.host_copies import CopyIn, HostCopies, HostCopy

KIND = KvKind("model", DType.BF16, layers=3, heads=2, head_size=8)
POSITION_NBYTES = 2 * 3 * 2 * 8 * 2


def test_a_copy_takes_the_bytes_of_its_positions_until_it_is_used() -> None:
    copies = HostCopies(KIND, 4 * POSITION_NBYTES)
    copy = copies.take(3)
    assert copy == HostCopy(KvSegment(KIND, 0, 3), 0)
    assert copies.stats.held_bytes == copies.stats.out_bytes == 3 * POSITION_NBYTES
    assert copies.take(2) is None
    assert copies.take(0) is None
    assert copies.use(copy, 1, (7, 5)) == (CopyIn(copy.segment, 0, 1, (7, 5)),)
    assert (copies.stats.out, copies.stats.back, copies.stats.back_tokens) == (1, 1, 2)
    assert copies.stats.back_bytes == 2 * POSITION_NBYTES
    assert copies.stats.held_bytes == 0
    copies.validate([])
    assert copies.take(4) is not None


@pytest.mark.parametrize("first", [3, 4])
def test_nothing_is_copied_back_that_is_there_already(first: int) -> None:
    copies = HostCopies(KIND, 4 * POSITION_NBYTES)
    copy = copies.take(3)
    assert copy is not None
    assert copies.use(copy, first, (1,)) == ()
    assert (copies.stats.back, copies.stats.held_bytes) == (0, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=60))
def test_copies_never_overlap_and_leave_nothing_behind(calls: list[tuple[bool, int]]) -> None:
    copies, held = HostCopies(KIND, 64 * POSITION_NBYTES), list[HostCopy]()
    for takes, number in calls:
        if takes and (copy := copies.take(number)) is not None:
            held.append(copy)
        elif held and not takes:
            copies.free(held.pop(number % len(held)))
        copies.validate(held)
        places = sorted((copy.offset, copy.offset + copy.segment.nbytes) for copy in held)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
        assert not places or places[-1][1] <= copies.stats.capacity_bytes
    for copy in held:
        copies.free(copy)
    assert copies.stats.held_bytes == 0
    copies.validate([])
