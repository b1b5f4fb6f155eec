"""Arenas of simulated instances: their size is real, and their contents are zeros that take no memory."""

import mmap
import sys
from bisect import bisect_left, insort

from triptych.domain.embedding import GENERATION_NBYTES
from triptych.domain.region import Region
from triptych.transport.arena import HeaderArena

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which ``mmap`` of Python 3.11 does not name: pages that are only read are not counted as memory."""
_ZEROS = memoryview(bytes(1 << 16))


def zeros(nbytes: int) -> memoryview:
    """Read-only zeros, without memory of their own. Not for a size that differs each time: the largest one is kept."""
    global _ZEROS  # noqa: PLW0603 - grows
    if nbytes > _ZEROS.nbytes:
        _ZEROS = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)).toreadonly()
    return _ZEROS[:nbytes]


class SparseArena(HeaderArena):
    """``ports.Arena`` over memory that is never filled: of what is written, only the words around slots are kept.

    Everything else reads as zeros, so embeddings and segments have the checksum of zeros.
    """

    def __init__(self, nbytes: int, *, instance_id: str, epoch: int, part: str = "") -> None:
        super().__init__(nbytes, instance_id=instance_id, epoch=epoch, part=part)
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._memory = memoryview(self._map)
        self._memory[: len(self.probe)] = self.probe
        self._words: list[int] = []
        """Offsets of the words that were written, in order."""

    @property
    def region(self) -> Region:
        """Raises NotImplementedError: no hardware reads it."""
        raise NotImplementedError("the memory of a simulated instance")

    def read(self, offset: int, nbytes: int) -> memoryview:
        return self._memory[offset : offset + nbytes].toreadonly()

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Keep the words at both ends, of a slot its generation. What is between them are zeros."""
        part = memoryview(data).cast("B")
        self._clear(offset, part.nbytes)
        for at in {0, max(0, part.nbytes - GENERATION_NBYTES)}:
            if any(word := part[at : at + GENERATION_NBYTES]):
                self._memory[offset + at : offset + at + word.nbytes] = word
                insort(self._words, offset + at)

    def window(self, offset: int, nbytes: int) -> memoryview:
        """Zeros. What is written there is lost once it is sealed."""
        self._clear(offset, nbytes)
        return self._memory[offset : offset + nbytes]

    def _clear(self, offset: int, nbytes: int) -> None:
        first = bisect_left(self._words, offset - GENERATION_NBYTES + 1)
        last = bisect_left(self._words, offset + nbytes)
        for at in self._words[first:last]:
            self._memory[at : at + GENERATION_NBYTES] = bytes(GENERATION_NBYTES)
        del self._words[first:last]
