"""State of a sequence whose layers do not all keep the same of each position: as one segment, of all positions so far.

Layers with convolutions, linear attention or a recurrence have state of a fixed size, which the next token overwrites: there
is none of an earlier position. A layer with a sliding window may keep its last positions only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.kv_segment import KV, KvSegment

_DIGEST_NBYTES = 16
_ALIGNMENT = 16
HEADER_NBYTES = 2 * _ALIGNMENT
"""Digest of the kind, and positions: a reader takes no other state."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """Tensor of a layer's state. Its axis ``of_positions``, if any, has all positions, or the last ``most``."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    """0 on the axis of positions."""
    of_positions: int | None = None
    most: int | None = None

    def shape_at(self, positions: int) -> tuple[int, ...]:
        """Shape once so many positions are computed."""
        if (axis := self.of_positions) is None:
            return self.shape
        kept = positions if self.most is None else min(positions, self.most)
        return (*self.shape[:axis], kept, *self.shape[axis + 1 :])

    def nbytes_at(self, positions: int) -> int:
        return prod(self.shape_at(positions)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateKind:
    """``SegmentKind`` of states: a header, then the tensors in order, each aligned to 16 bytes."""

    model_revision: str
    """Digest of weights and configuration (``ModelInfo.revision``)."""
    tensors: tuple[StateTensor, ...]

    @property
    def is_whole(self) -> bool:
        return True

    @property
    def digest(self) -> str:
        return self._digest().hex()

    @property
    def position_nbytes(self) -> int:
        return sum(tensor.nbytes_at(1) for tensor in self.tensors if tensor.of_positions is not None)

    @property
    def segment_tokens(self) -> int:
        return 0

    def nbytes(self, positions: int) -> int:
        return HEADER_NBYTES + sum(_aligned(tensor.nbytes_at(positions)) for tensor in self.tensors)

    def spec(self, positions: int) -> TensorSpec:
        """Bytes, as data types differ."""
        return TensorSpec(KV, DType.U8, (self.nbytes(positions),))

    def segments(self, first: int, end: int) -> tuple[KvSegment, ...]:
        return (KvSegment(self, first, end - first),) if end > first else ()

    def header(self, positions: int) -> bytes:
        """First ``HEADER_NBYTES`` of a segment."""
        return (self._digest() + positions.to_bytes(8, "little")).ljust(HEADER_NBYTES, b"\0")

    def places(self, positions: int) -> Iterator[tuple[StateTensor, int]]:
        """The tensors, and where each begins in the segment."""
        offset = HEADER_NBYTES
        for tensor in self.tensors:
            yield tensor, offset
            offset += _aligned(tensor.nbytes_at(positions))

    def _digest(self) -> bytes:
        identity = blake2b(digest_size=_DIGEST_NBYTES, person=b"triptych-state")
        identity.update(self.model_revision.encode())
        for tensor in self.tensors:
            layout = f"\n{tensor.name} {tensor.dtype.value} {tensor.shape} {tensor.of_positions} {tensor.most}"
            identity.update(layout.encode())
        return identity.digest()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
