"""The text engine's KV cache: one allocation, bounded in bytes, divided into blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from triptych.machine.text.kv_blocks import Copy


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one token's keys and values."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def slot_nbytes(self) -> int:
        return 2 * self.layers * self.heads * self.head_size * self.dtype.itemsize


class KvCache:
    """Keys and values of all layers. A slot holds one token's; a block is a fixed number of contiguous slots.

    ``keys`` and ``values`` are [layers, slots, heads, head size]: the layout of paged kernels, in which whole rows are
    gathered and written. Attention over contiguous slots reads a view.
    """

    def __init__(
        self, shape: KvShape, *, nbytes: int, block_tokens: int, device: torch.device, spare: bool = False
    ) -> None:
        """Allocates at most ``nbytes``; on a CPU, pages never written cost nothing.

        With ``spare`` there is one block more than ``blocks``, which belongs to no sequence.
        """
        self.block_tokens = block_tokens
        blocks = nbytes // (shape.slot_nbytes * block_tokens)
        self.blocks = blocks - spare
        if self.blocks < 1:
            least = shape.slot_nbytes * block_tokens * (1 + spare)
            raise ValueError(f"a KV cache of {nbytes} bytes holds no block of {block_tokens} tokens: one takes {least}")
        self.spare_block = self.blocks if spare else None
        size = (shape.layers, blocks * block_tokens, shape.heads, shape.head_size)
        self.keys = torch.empty(size, dtype=shape.dtype, device=device)
        self.values = torch.empty(size, dtype=shape.dtype, device=device)

    def slots(self, table: Sequence[int], first: int, end: int) -> list[int]:
        """The slots of positions ``first`` to ``end`` of a sequence with these blocks."""
        size = self.block_tokens
        slots: list[int] = []
        while first < end:
            block, inside = divmod(first, size)
            count = min(end - first, size - inside)
            at = table[block] * size + inside
            slots.extend(range(at, at + count))
            first += count
        return slots

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copy the contents of blocks, in the given order."""
        size = self.block_tokens
        for source, target in copies:
            for begin, end in _runs(source, target):
                a, b, n = source[begin] * size, target[begin] * size, (end - begin) * size
                for memory in (self.keys, self.values):
                    rows = memory[:, a : a + n]
                    memory[:, b : b + n] = rows.clone() if abs(a - b) < n else rows


def _runs(source: Sequence[int], target: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Split both into runs that are contiguous in both."""
    begin = 0
    for at in range(1, len(source) + 1):
        if at == len(source) or source[at] != source[at - 1] + 1 or target[at] != target[at - 1] + 1:
            yield begin, at
            begin = at
