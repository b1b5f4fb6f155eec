"""The text engine's KV cache: one allocation, bounded in bytes, divided into blocks."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from triptych.domain.kv_segment import KvKind, KvSegment
from triptych.engine.tensors import TORCH_DTYPES
from triptych.machine.text.kv_blocks import Copy


class KvCache:
    """Keys and values of all layers. A slot holds one token's; a block is a fixed number of contiguous slots.

    ``keys`` and ``values`` are [layers, slots, heads, head size]: the layout of paged kernels, in which whole rows are
    gathered and written. Attention over contiguous slots reads a view.
    """

    def __init__(
        self, kind: KvKind, *, nbytes: int, block_tokens: int, device: torch.device, spare: bool = False
    ) -> None:
        """Allocates at most ``nbytes``; on a CPU, pages never written cost nothing.

        With ``spare`` there is one block more than ``blocks``, which belongs to no sequence.
        """
        self.kind = kind
        self.block_tokens = block_tokens
        blocks = nbytes // (kind.position_nbytes * block_tokens)
        self.blocks = blocks - spare
        if self.blocks < 1:
            least = kind.position_nbytes * block_tokens * (1 + spare)
            raise ValueError(f"a KV cache of {nbytes} bytes holds no block of {block_tokens} tokens: one takes {least}")
        self.spare_block = self.blocks if spare else None
        size = (kind.layers, blocks * block_tokens, kind.heads, kind.head_size)
        self.keys = torch.empty(size, dtype=TORCH_DTYPES[kind.dtype], device=device)
        self.values = torch.empty(size, dtype=TORCH_DTYPES[kind.dtype], device=device)

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

    def export(self, table: Sequence[int], first: int, end: int, memory: torch.Tensor) -> KvSegment:
        """Copy positions ``first`` to ``end`` of a sequence with these blocks to ``memory``; returns what is there then.

        ``memory`` is [bytes] of uint8 on the CPU, aligned to the data type. From a GPU to pinned memory nothing waits for the
        copy: it is done before what the device is given later, but the CPU must not read it without synchronizing.
        """
        segment = KvSegment(self.kind, first, end - first)
        slots = torch.tensor(self.slots(table, first, end), dtype=torch.long, device=self.keys.device)
        for source, copied in zip((self.keys, self.values), self._tensors(segment, memory), strict=True):
            if _is_on_host(source):
                torch.index_select(source, 1, slots, out=copied)
            else:
                for layer, row in zip(source, copied, strict=True):  # bounds the memory that it takes on the device
                    row.copy_(layer.index_select(0, slots), non_blocking=True)
        return segment

    def load(self, table: Sequence[int], segment: KvSegment, memory: torch.Tensor, *, first: int) -> None:
        """Copy the segment's positions from ``first`` on from ``memory``, as ``export`` left it, into these blocks.

        Raises ValueError if the segment is of another kind, or if it does not have these positions or the blocks no room.
        """
        if segment.kind != self.kind:
            raise ValueError(f"keys and values of the kind {segment.kind} cannot be read as {self.kind}")
        if not segment.first <= first <= segment.end <= len(table) * self.block_tokens:
            raise ValueError(
                f"positions {segment.first} to {segment.end}, from {first} on, do not fit {len(table)} blocks of {self.block_tokens}"
            )
        slots = self.slots(table, first, segment.end)
        for target, copied in zip((self.keys, self.values), self._tensors(segment, memory), strict=True):
            rows = copied[:, first - segment.first :]
            if _is_on_host(target):
                for begin, end in _runs(slots, slots):
                    target[:, slots[begin] : slots[begin] + end - begin] = rows[:, begin:end]
            else:
                where = torch.tensor(slots, dtype=torch.long, device=target.device)
                for layer, row in zip(target, rows, strict=True):
                    layer.index_copy_(0, where, row.to(target.device, non_blocking=True))

    def _tensors(self, segment: KvSegment, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """Keys and values of a layer, each [layers, positions, heads, head size]."""
        kind = self.kind
        flat = memory[: segment.nbytes].view(TORCH_DTYPES[kind.dtype])
        return iter(flat.view(2, kind.layers, segment.positions, kind.heads, kind.head_size))


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _runs(source: Sequence[int], target: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Split both into runs that are contiguous in both."""
    begin = 0
    for at in range(1, len(source) + 1):
        if at == len(source) or source[at] != source[at - 1] + 1 or target[at] != target[at - 1] + 1:
            yield begin, at
            begin = at
