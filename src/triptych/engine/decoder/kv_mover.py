"""Carries out the scheduler's moves of keys and values: between blocks, and between blocks and the memory of the host."""

from collections.abc import Iterable, Sequence

import torch

from triptych.domain.kv_segment import KvSegment
from triptych.engine.decoder.kv_cache import KvCache
from triptych.engine.heap import give_back
from triptych.engine.timing import fastest_s
from triptych.machine.text.host_copies import CopyIn, CopyOut
from triptych.machine.text.kv_blocks import Copy
from triptych.machine.text.running_batch import Move


class KvMover:
    """Moves keys and values of one cache. Without ``reserve`` there is no host memory, and nothing may be copied to it."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache
        self._host = self._memory(0)

    def reserve(self, nbytes: int) -> None:
        """Allocate host memory, pinned for a GPU; on a CPU, pages never written cost nothing."""
        self._host = self._memory(nbytes)

    def give_back(self) -> None:
        """Give the memory of blocks and copies back, on a CPU: there is nothing in them. It is taken again as it is used."""
        if not self._is_cuda:
            for memory in (self.cache.keys, self.cache.values, self._host):
                give_back(memory.data_ptr(), memory.nbytes)

    def run(self, moves: Iterable[Move]) -> None:
        """Run the moves in the given order."""
        for move in moves:
            if isinstance(move, CopyOut):
                self.cache.export(move.blocks, move.segment.first, move.segment.end, self._host[move.offset :])
            elif isinstance(move, CopyIn):
                self.cache.load(move.blocks, move.segment, self._host[move.offset :], first=move.first)
            elif isinstance(move, Copy):
                self.cache.copy([move])

    def pack(self, table: Sequence[int], segment: KvSegment, memory: memoryview) -> None:
        """Copy positions of a sequence with these blocks to ``memory``. They are there when it returns."""
        self.cache.export(table, segment.first, segment.end, torch.frombuffer(memory, dtype=torch.uint8))
        self._finish()

    def unpack(self, table: Sequence[int], segment: KvSegment, memory: memoryview, *, first: int) -> None:
        """Copy the segment's positions from ``first`` on into these blocks. ``memory`` is not read after it returns."""
        owned = bytearray(memory) if memory.readonly else memory  # torch takes no read-only memory
        self.cache.load(table, segment, torch.frombuffer(owned, dtype=torch.uint8), first=first)
        self._finish()

    def _finish(self) -> None:
        """A device may copy from and to pinned memory after the call that says so."""
        if self._is_cuda:
            torch.cuda.synchronize(self.cache.keys.device)

    def round_trip_s(self, positions: int) -> float:
        """The time to copy as many positions out and back in, measured now in the first blocks, which it leaves as they are."""
        table = range(-(-positions // self.cache.block_tokens))
        memory = self._memory(KvSegment(self.cache.kind, 0, positions).nbytes)

        def copy_both_ways() -> None:
            segment = self.cache.export(table, 0, positions, memory)
            self.cache.load(table, segment, memory, first=0)
            self._finish()

        return fastest_s(copy_both_ways)

    @property
    def _is_cuda(self) -> bool:
        return self.cache.keys.device.type == "cuda"

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_cuda and nbytes > 0)
