"""An allocator of byte extents in one block of memory.

It is deterministic, so that a replayed run has the same layout. Best fit; large extents are cut from the top of their
gap and small ones from its bottom, so that mixed sizes (1 KB to 100 MB) leave usable gaps.
"""

from bisect import bisect_left, insort

ALIGNMENT = 64
"""Start and size of every extent are multiples of a cache line, to avoid false sharing."""

_LARGE_NBYTES = 1 << 20


class Extents:
    """Allocator over the bytes ``[start, end)``."""

    def __init__(self, start: int, end: int) -> None:
        """``start`` is rounded up and ``end`` down to ``ALIGNMENT``. Raises ValueError if nothing is left."""
        self._start = round_up(start)
        self._end = end // ALIGNMENT * ALIGNMENT
        if start < 0 or self._end <= self._start:
            raise ValueError(f"extents need at least {ALIGNMENT} bytes, got [{start}, {end})")
        self._taken: dict[int, int] = {}
        self._gap_at: dict[int, int] = {}
        self._gap_ending_at: dict[int, int] = {}
        self._gaps_by_size: list[tuple[int, int]] = []
        self._free = 0
        self._add_gap(self._start, self._end - self._start)

    @property
    def start(self) -> int:
        return self._start

    @property
    def end(self) -> int:
        return self._end

    @property
    def capacity(self) -> int:
        """Total bytes that can be allocated."""
        return self._end - self._start

    @property
    def free_bytes(self) -> int:
        return self._free

    @property
    def largest_gap(self) -> int:
        """Largest extent that can be allocated now."""
        return self._gaps_by_size[-1][0] if self._gaps_by_size else 0

    def allocate(self, nbytes: int) -> int | None:
        """Allocate at least ``nbytes`` (one or more). Returns the offset, or None if no gap is large enough."""
        if nbytes <= 0:
            raise ValueError(f"an extent has at least one byte, got {nbytes}")
        size = round_up(nbytes)
        at = bisect_left(self._gaps_by_size, (size, -1))
        if at == len(self._gaps_by_size):
            return None
        gap_size, gap = self._gaps_by_size[at]
        self._drop_gap(gap, gap_size)
        if size >= _LARGE_NBYTES:
            offset = gap + gap_size - size
            self._add_gap(gap, gap_size - size)
        else:
            offset = gap
            self._add_gap(gap + size, gap_size - size)
        self._taken[offset] = size
        return offset

    def free(self, offset: int) -> None:
        """Free the extent at ``offset``. Raises ValueError if there is none."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise ValueError(f"no extent starts at {offset}")
        start, end = offset, offset + size
        before = self._gap_ending_at.get(start)
        if before is not None:
            self._drop_gap(before, start - before)
            start = before
        after = self._gap_at.get(end)
        if after is not None:
            self._drop_gap(end, after)
            end += after
        self._add_gap(start, end - start)

    def size(self, offset: int) -> int:
        """Size of the extent at ``offset``, including rounding."""
        return self._taken[offset]

    def validate(self) -> None:
        """Check that gaps and extents are aligned and tile the whole range, and that no two gaps are adjacent."""
        pieces = sorted(
            [(offset, size, True) for offset, size in self._taken.items()]
            + [(offset, size, False) for offset, size in self._gap_at.items()]
        )
        at, previous_taken = self._start, True
        for offset, size, taken in pieces:
            assert offset == at, f"hole or overlap at {at}: next piece starts at {offset}"
            assert size > 0, f"empty piece at {offset}"
            assert offset % ALIGNMENT == 0, f"extent at {offset} is not aligned"
            assert size % ALIGNMENT == 0, f"extent of {size} bytes is not aligned"
            assert taken or previous_taken, f"gap at {offset} was not joined with the one before"
            at, previous_taken = offset + size, taken
        assert at == self._end, f"pieces end at {at}, memory at {self._end}"
        assert self._free == sum(self._gap_at.values()), "free bytes do not add up"
        assert self._gaps_by_size == sorted((s, o) for o, s in self._gap_at.items())
        assert self._gap_ending_at == {o + s: o for o, s in self._gap_at.items()}

    def _add_gap(self, offset: int, size: int) -> None:
        if size == 0:
            return
        self._gap_at[offset] = size
        self._gap_ending_at[offset + size] = offset
        insort(self._gaps_by_size, (size, offset))
        self._free += size

    def _drop_gap(self, offset: int, size: int) -> None:
        del self._gap_at[offset]
        del self._gap_ending_at[offset + size]
        del self._gaps_by_size[bisect_left(self._gaps_by_size, (size, offset))]
        self._free -= size


def round_up(nbytes: int) -> int:
    """``nbytes`` rounded up to ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
