"""The free blocks among equal blocks, as runs of adjacent ones."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple


class FreeRun(NamedTuple):
    """Blocks ``start`` to ``start + length``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class FreeRuns:
    """The free blocks of 0 to ``blocks``, initially all."""

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"at least one block is needed, got {blocks}")
        self._blocks = blocks
        self._starts = [0]
        self._counts = {0: blocks}
        self._lengths = [blocks]
        """Of all runs, each once, sorted."""
        self._starts_of = {blocks: [0]}
        """By length, sorted."""
        self._free = blocks

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return self._free

    def __iter__(self) -> Iterator[FreeRun]:
        return (FreeRun(start, self._counts[start]) for start in self._starts)

    def fitting(self, length: int) -> Iterator[FreeRun]:
        """Runs of at least this length: the shortest first, and of equally long ones the first."""
        for at in range(bisect_left(self._lengths, length), len(self._lengths)):
            found = self._lengths[at]
            yield from (FreeRun(start, found) for start in self._starts_of[found])

    def get(self, start: int) -> FreeRun | None:
        """The run that starts there; None if none does."""
        count = self._counts.get(start)
        return None if count is None else FreeRun(start, count)

    def __contains__(self, block: int) -> bool:
        run = self._run_before(block)
        return run is not None and block < run.end

    def take(self, start: int, count: int) -> None:
        """Take free blocks. Raises ValueError if they are not free."""
        run = self._run_before(start)
        if run is None or start + count > run.end or count < 1:
            raise ValueError(f"blocks {start} to {start + count} are not free")
        self._drop(run.start)
        if start > run.start:
            self._add(run.start, start - run.start)
        if start + count < run.end:
            self._add(start + count, run.end - start - count)

    def take_any(self) -> int:
        """Take the last free block. Raises ValueError if none is free."""
        if not self._starts:
            raise ValueError("no block is free")
        last = self._starts[-1]
        count = self._counts[last]
        self._drop(last)
        if count > 1:
            self._add(last, count - 1)
        return last + count - 1

    def give(self, block: int) -> FreeRun:
        """Free a block. Returns the run that it is now part of. Raises ValueError if it is free already."""
        if block in self or not 0 <= block < self._blocks:
            raise ValueError(f"block {block} is not taken")
        start, end = block, block + 1
        before = self._run_before(block)
        if before is not None and before.end == block:
            start = before.start
            self._drop(start)
        if end in self._counts:
            following = self._counts[end]
            self._drop(end)
            end += following
        self._add(start, end - start)
        return FreeRun(start, end - start)

    def validate(self) -> None:
        """Raises AssertionError unless the runs are sorted, separate, within bounds and counted."""
        runs = list(self)
        assert all(run.length > 0 for run in runs), "an empty run"
        assert all(a.end < b.start for a, b in pairwise(runs)), "runs touch"
        assert not runs or (runs[0].start >= 0 and runs[-1].end <= self._blocks), "outside"
        assert self._free == sum(run.length for run in runs), "free blocks do not add up"
        assert set(self._counts) == set(self._starts), "runs by start differ"
        by_length = sorted((length, start) for start, length in runs)
        assert [(run.length, run.start) for run in self.fitting(0)] == by_length, "runs by length differ"

    def _run_before(self, block: int) -> FreeRun | None:
        """The last run that starts at or before ``block``."""
        at = bisect_right(self._starts, block) - 1
        return FreeRun(self._starts[at], self._counts[self._starts[at]]) if at >= 0 else None

    def _add(self, start: int, count: int) -> None:
        insort(self._starts, start)
        self._counts[start] = count
        equal = self._starts_of.get(count)
        if equal is None:
            insort(self._lengths, count)
            self._starts_of[count] = [start]
        else:
            insort(equal, start)
        self._free += count

    def _drop(self, start: int) -> None:
        _remove(self._starts, start)
        count = self._counts.pop(start)
        equal = self._starts_of[count]
        _remove(equal, start)
        if not equal:
            del self._starts_of[count]
            _remove(self._lengths, count)
        self._free -= count


def _remove(values: list[int], value: int) -> None:
    """From sorted ones, which have it."""
    del values[bisect_left(values, value)]
