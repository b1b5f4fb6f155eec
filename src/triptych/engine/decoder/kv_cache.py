"""Where the keys and values of the text engine lie: one piece of memory, bounded in bytes, in blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from triptych.machine.text.kv_blocks import Copy


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
    """Keys and values of all layers. A slot holds one token's, a block so many neighbouring slots.

    ``keys`` and ``values`` are [layers, slots, heads, head size]: the order that paged kernels take, and one that
    gathers and writes whole rows. Attention over neighbouring slots reads a view, without gathering.
    """

    def __init__(
        self, shape: KvShape, *, nbytes: int, block_tokens: int, device: torch.device, spare: bool = False
    ) -> None:
        """Takes at most ``nbytes``; on a CPU, pages that are never written cost nothing.

        With ``spare`` one more block than ``blocks`` is there, that is no sequence's.
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
        """The slots of positions ``first`` to ``end`` of a sequence that has these blocks."""
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
        """Copy the contents of blocks, in the order in which they are told."""
        size = self.block_tokens
        for source, target in copies:
            for begin, end in _runs(source, target):
                a, b, n = source[begin] * size, target[begin] * size, (end - begin) * size
                for memory in (self.keys, self.values):
                    rows = memory[:, a : a + n]
                    memory[:, b : b + n] = rows.clone() if abs(a - b) < n else rows


def _runs(source: Sequence[int], target: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Parts of both that are neighbours in both."""
    begin = 0
    for at in range(1, len(source) + 1):
        if at == len(source) or source[at] != source[at - 1] + 1 or target[at] != target[at - 1] + 1:
            yield begin, at
            begin = at
