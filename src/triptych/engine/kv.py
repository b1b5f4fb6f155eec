"""KV memory of the text engine: one block, bounded in bytes, handed out in contiguous extents."""

from dataclasses import dataclass

import torch

from triptych.machine.extents import ALIGNMENT, Extents


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token takes."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def slot_nbytes(self) -> int:
        return 2 * self.layers * self.heads * self.head_size * self.dtype.itemsize


class KvCache:
    """Keys and values of all layers. A slot holds one token's; a sequence has a run of slots.

    ``keys`` and ``values`` are [layers, heads, slots, head size], so that one head of one sequence is one run of
    memory: attention over a sequence reads a view, without gathering (the fastest way on a CPU).
    """

    def __init__(self, shape: KvShape, *, nbytes: int, device: torch.device) -> None:
        """Takes at most ``nbytes``; on a CPU, pages that are never written cost nothing."""
        self.slots = nbytes // shape.slot_nbytes
        if not self.slots:
            raise ValueError(f"a KV cache of {nbytes} bytes holds no token: one takes {shape.slot_nbytes}")
        size = (shape.layers, shape.heads, self.slots, shape.head_size)
        self.keys = torch.empty(size, dtype=shape.dtype, device=device)
        self.values = torch.empty(size, dtype=shape.dtype, device=device)
        # The allocator's smallest unit stands for one slot, whatever a slot's real size.
        self._extents = Extents(0, self.slots * ALIGNMENT)

    @property
    def free_slots(self) -> int:
        return self._extents.free_bytes // ALIGNMENT

    @property
    def largest_run(self) -> int:
        """Slots of the longest sequence that can start now."""
        return self._extents.largest_gap // ALIGNMENT

    def take(self, slots: int) -> int | None:
        """First slot of a run of ``slots``; None while no gap is that long."""
        offset = self._extents.allocate(slots * ALIGNMENT)
        return None if offset is None else offset // ALIGNMENT

    def copy(self, source: int, target: int, slots: int) -> None:
        """Copy the first ``slots`` slots of the run at ``source`` to the run at ``target``."""
        for memory in (self.keys, self.values):
            memory[:, :, target : target + slots] = memory[:, :, source : source + slots]

    def give(self, first: int) -> None:
        """Give back the run that starts at slot ``first``."""
        self._extents.free(first * ALIGNMENT)
