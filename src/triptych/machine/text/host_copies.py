"""Copies of preempted sequences' keys and values in the memory of the host: which bytes belong to which copy."""

from dataclasses import dataclass
from typing import NamedTuple

from triptych.domain.kv_segment import KvCopies, KvKind, KvSegment
from triptych.machine.arena.extents import Extents


class CopyOut(NamedTuple):
    """Copy the segment's positions out of these blocks of a sequence, to ``offset`` in host memory."""

    blocks: tuple[int, ...]
    segment: KvSegment
    offset: int


class CopyIn(NamedTuple):
    """Copy the segment's positions from ``first`` on, from ``offset`` in host memory into these blocks of a sequence."""

    segment: KvSegment
    offset: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The first positions of a sequence, at ``offset``."""

    segment: KvSegment
    offset: int


class HostCopies:
    """Owner of the copies of preempted sequences, in ``nbytes`` of host memory."""

    def __init__(self, kind: KvKind, nbytes: int) -> None:
        self.kind = kind
        self._extents = Extents(0, nbytes)
        self._held_bytes = 0
        self._out = self._out_bytes = 0
        self._back = self._back_tokens = 0

    @property
    def stats(self) -> KvCopies:
        return KvCopies(
            capacity_bytes=self._extents.capacity,
            held_bytes=self._held_bytes,
            out=self._out,
            out_bytes=self._out_bytes,
            back=self._back,
            back_bytes=self._back_tokens * self.kind.position_nbytes,
            back_tokens=self._back_tokens,
        )

    def take(self, positions: int) -> HostCopy | None:
        """Allocate room for a sequence's first ``positions``. Returns None if there is none, or nothing to copy."""
        segment = KvSegment(self.kind, 0, positions)
        if not positions or (offset := self._extents.allocate(segment.nbytes)) is None:
            return None
        self._held_bytes += segment.nbytes
        self._out += 1
        self._out_bytes += segment.nbytes
        return HostCopy(segment, offset)

    def use(self, copy: HostCopy, first: int, blocks: tuple[int, ...]) -> tuple[CopyIn, ...]:
        """Free a copy that is copied back from position ``first`` on, before its room is written again."""
        self.free(copy)
        left = copy.segment.end - first
        if left <= 0:
            return ()
        self._back += 1
        self._back_tokens += left
        return (CopyIn(copy.segment, copy.offset, first, blocks),)

    def free(self, copy: HostCopy) -> None:
        self._extents.free(copy.offset)
        self._held_bytes -= copy.segment.nbytes

    def validate(self, copies: list[HostCopy]) -> None:
        """Raises AssertionError unless exactly these copies have room."""
        self._extents.validate()
        taken = sum(self._extents.size(copy.offset) for copy in copies)
        assert taken == self._extents.capacity - self._extents.free_bytes, "a copy is lost"
        assert sum(copy.segment.nbytes for copy in copies) == self._held_bytes, "bytes do not add up"
