import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from triptych.machine.arena.extents import ALIGNMENT, Extents


def test_every_extent_is_aligned_and_inside() -> None:
    extents = Extents(100, 10_000)
    offsets = [extents.allocate(n) for n in (1, 64, 65, 1000)]
    assert offsets == [128, 192, 256, 384]
    assert extents.size(256) == 128
    assert (extents.start, extents.end, extents.capacity) == (128, 9984, 9856)
    extents.validate()


def test_an_extent_that_does_not_fit_is_none_and_takes_nothing() -> None:
    extents = Extents(0, 1024)
    assert extents.allocate(1025) is None
    assert extents.allocate(1024) == 0
    assert extents.allocate(1) is None
    assert extents.free_bytes == 0
    assert extents.largest_gap == 0


def test_adjacent_freed_extents_are_merged() -> None:
    extents = Extents(0, 1024)
    offsets = [extents.allocate(256) for _ in range(4)]
    for offset in (offsets[0], offsets[2], offsets[1], offsets[3]):
        assert offset is not None
        extents.free(offset)
        extents.validate()
    assert extents.largest_gap == 1024


def test_the_smallest_gap_that_fits_is_used() -> None:
    extents = Extents(0, 64 * 20)
    taken = [extents.allocate(64 * n) for n in (4, 1, 2, 1, 12)]
    for index in (0, 2):
        offset = taken[index]
        assert offset is not None
        extents.free(offset)
    assert extents.allocate(64 * 2) == taken[2]


def test_freeing_an_unallocated_extent_is_refused() -> None:
    extents = Extents(0, 1024)
    extents.allocate(100)
    with pytest.raises(ValueError, match="no extent"):
        extents.free(64)
    with pytest.raises(ValueError, match="at least one byte"):
        extents.allocate(0)
    for start, end in ((1, 64), (-1, 1024), (64, 64)):
        with pytest.raises(ValueError, match="need at least"):
            Extents(start, end)


def test_the_largest_gap_is_reported() -> None:
    extents = Extents(0, 64 * 10)
    first, _, third = (extents.allocate(64 * n) for n in (2, 1, 4))
    assert extents.largest_gap == 64 * 3
    assert first is not None
    extents.free(first)
    assert extents.largest_gap == 64 * 3
    assert third is not None
    extents.free(third)
    assert extents.largest_gap == 64 * 7


def test_large_extents_are_taken_from_the_top_and_small_ones_from_the_bottom() -> None:
    extents = Extents(0, 4 << 20)
    assert [extents.allocate(nbytes) for nbytes in ((1 << 20) - 64, 1 << 20, 2 << 20)] == [0, 3 << 20, 1 << 20]


def test_mixed_sizes_leave_little_waste() -> None:
    """1 KB to 100 MB, freed in random order at 70 % load: large embeddings must still find room."""
    rng = random.Random(7)
    extents = Extents(4096, 1 << 30)
    held: list[int] = []
    used = failures = attempts = 0
    for _ in range(3000):
        nbytes = int(1024 * 10 ** (rng.random() * 5))
        while used + nbytes > 0.7 * extents.capacity:
            offset = held.pop(rng.randrange(len(held)))
            used -= extents.size(offset)
            extents.free(offset)
        attempts += 1
        got = extents.allocate(nbytes)
        if got is None:
            failures += 1
        else:
            held.append(got)
            used += extents.size(got)
    extents.validate()
    assert failures / attempts < 0.02


class ExtentsModel(RuleBasedStateMachine):
    """Against a plain set of bytes in units of ``ALIGNMENT``."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(0, 64 * ALIGNMENT)
        self.units: set[int] = set()

    @rule(target=taken, nbytes=st.integers(1, 20 * ALIGNMENT))
    def allocate(self, nbytes: int) -> tuple[int, int]:
        offset = self.extents.allocate(nbytes)
        if offset is None:
            assert self.extents.largest_gap < nbytes
            return (-1, 0)
        size = self.extents.size(offset)
        assert nbytes <= size < nbytes + ALIGNMENT
        units = set(range(offset // ALIGNMENT, (offset + size) // ALIGNMENT))
        assert not units & self.units
        self.units |= units
        return (offset, size)

    @rule(extent=consumes(taken))
    def free(self, extent: tuple[int, int]) -> None:
        offset, size = extent
        if offset >= 0:
            self.extents.free(offset)
            self.units -= set(range(offset // ALIGNMENT, (offset + size) // ALIGNMENT))

    @invariant()
    def holds(self) -> None:
        self.extents.validate()
        assert self.extents.free_bytes == self.extents.capacity - len(self.units) * ALIGNMENT


TestExtentsModel = ExtentsModel.TestCase
