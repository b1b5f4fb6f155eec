"""Keys and values of a range of positions of a sequence, outside of a KV cache."""

from dataclasses import dataclass

from triptych.domain.embedding import DType


@dataclass(frozen=True, slots=True)
class KvKind:
    """What keys and values are: where kinds are equal, so are those of equal tokens, items and positions, up to rounding."""

    model_revision: str
    """Digest of weights and configuration (``ModelInfo.revision``)."""
    dtype: DType
    layers: int
    heads: int
    """Key heads per layer, as many as value heads."""
    head_size: int

    @property
    def position_nbytes(self) -> int:
        """Bytes of one position in all layers."""
        return 2 * self.layers * self.heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KvSegment:
    """Positions ``first`` to ``end``: the keys, then the values, each contiguous [layers, positions, heads, head size].

    Blocks do not show in it, so that it can be copied into a cache with blocks of another size and in any place. Keys are as
    attention reads them, with the rotary embedding of their positions: a segment belongs to these positions of sequences that
    are equal up to ``end``. All layers have all positions, those with a sliding window as well. Of a model with
    cross-attention it has the text's own keys and values, not those of items.
    """

    kind: KvKind
    first: int
    positions: int

    @property
    def end(self) -> int:
        return self.first + self.positions

    @property
    def nbytes(self) -> int:
        return self.positions * self.kind.position_nbytes


@dataclass(frozen=True, slots=True)
class KvCopies:
    """Copies of preempted sequences' keys and values in the memory of the host; counts are since the start."""

    capacity_bytes: int = 0
    held_bytes: int = 0
    out: int = 0
    """Sequences copied out of the KV cache ..."""
    out_bytes: int = 0
    back: int = 0
    """... and back."""
    back_bytes: int = 0
    back_tokens: int = 0
    """Tokens that were copied back instead of recomputed."""
