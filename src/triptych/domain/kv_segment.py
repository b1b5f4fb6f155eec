"""Keys and values of a range of positions of a sequence, outside of a KV cache."""

from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Protocol

from triptych.domain.embedding import KEY_NBYTES, DType, TensorSpec, Ticket
from triptych.domain.record import record

KV = "kv"
"""Name of the one tensor of a sealed segment."""
MOST_PREFIX_SEGMENTS = 256
"""Most segments of the prefix of a prompt that is looked for at other instances."""
_LAYOUT = b"1"
"""Changes with what is in a segment."""
_GRID_TOKENS = 64
_MOST_SEGMENT_NBYTES = 8 << 20
_MOST_SEGMENT_TOKENS = 256


class SegmentKind(Protocol):
    """Kind of what segments have. Where kinds are equal, so are the values of equal tokens, items and positions, up to
    rounding.
    """

    @property
    def is_whole(self) -> bool:
        """Whether a segment has all positions from 0 on, and only those that its sequence has computed so far: states cannot be cut."""
        ...

    @property
    def digest(self) -> str:
        """Instances with equal digests can exchange segments."""
        ...

    @property
    def position_nbytes(self) -> int:
        """Most bytes that one more position takes."""
        ...

    @property
    def segment_tokens(self) -> int:
        """Positions of a segment that is not the last of its sequence; 0 if there is only one."""
        ...

    def nbytes(self, positions: int) -> int:
        """Bytes of a segment of so many positions."""
        ...

    def spec(self, positions: int) -> TensorSpec:
        """Spec of such a segment as one tensor."""
        ...

    def segments(self, first: int, end: int) -> tuple["KvSegment", ...]:
        """Positions ``first`` to ``end``, cut into segments. ``first`` is 0 if segments are whole."""
        ...


@dataclass(frozen=True, slots=True)
class KvKind:
    """``SegmentKind`` of keys and values, which all layers have alike of each position."""

    model_revision: str
    """Digest of weights and configuration (``ModelInfo.revision``)."""
    dtype: DType
    layers: int
    heads: int
    """Key heads per layer, as many as value heads."""
    head_size: int

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def position_nbytes(self) -> int:
        """Bytes of one position in all layers."""
        return 2 * self.layers * self.heads * self.head_size * self.dtype.itemsize

    @property
    def digest(self) -> str:
        fields = (self.model_revision, self.dtype.value, self.layers, self.heads, self.head_size)
        text = "\n".join(map(str, fields)).encode()
        return blake2b(text, digest_size=16, person=b"triptych-kv-kind", salt=_LAYOUT).hexdigest()

    @property
    def segment_tokens(self) -> int:
        """Positions of a segment that is not the last of its sequence: a multiple of 64, the same in every instance, so that equal
        beginnings of sequences are cut into equal segments.
        """
        fitting = _MOST_SEGMENT_NBYTES // self.position_nbytes // _GRID_TOKENS * _GRID_TOKENS
        return min(max(fitting, _GRID_TOKENS), _MOST_SEGMENT_TOKENS)

    def nbytes(self, positions: int) -> int:
        return positions * self.position_nbytes

    def spec(self, positions: int) -> TensorSpec:
        """[2, layers, positions, heads, head size], the keys first."""
        return TensorSpec(KV, self.dtype, (2, self.layers, positions, self.heads, self.head_size))

    def segments(self, first: int, end: int) -> tuple["KvSegment", ...]:
        """Positions ``first`` to ``end``, cut at the multiples of ``segment_tokens``."""
        size = self.segment_tokens
        cuts = [first, *range((first // size + 1) * size, end, size), end]
        return tuple(KvSegment(self, cut, after - cut) for cut, after in pairwise(cuts) if after > cut)


@dataclass(frozen=True, slots=True)
class KvSegment:
    """Positions ``first`` to ``end`` of a sequence. Of a ``KvKind``: the keys, then the values, each contiguous [layers, positions,
    heads, head size]. Of others see ``sequence_state``.

    Blocks do not show in it, so that it can be copied into a cache with blocks of another size and in any place. Keys are as
    attention reads them, with the rotary embedding of their positions: a segment belongs to these positions of sequences that
    are equal up to ``end``. All layers have all positions, those with a sliding window as well. Of a model with
    cross-attention it has the text's own keys and values, not those of items.
    """

    kind: SegmentKind
    first: int
    positions: int

    @property
    def end(self) -> int:
        return self.first + self.positions

    @property
    def nbytes(self) -> int:
        return self.kind.nbytes(self.positions)

    @property
    def spec(self) -> TensorSpec:
        return self.kind.spec(self.positions)

    def key(self, prefix_hash: bytes) -> bytes:
        """Key over the full identity. ``prefix_hash``: over all tokens and items up to ``end``, and the tenant's salt."""
        return segment_key(self.kind.digest, self.first, self.positions, prefix_hash)


def segment_key(kind: str, first: int, positions: int, prefix_hash: bytes) -> bytes:
    """The key of a segment, where only the digest of its kind is known."""
    identity = blake2b(digest_size=KEY_NBYTES, person=b"triptych-kv")
    identity.update(f"{kind} {first} {positions} ".encode())
    identity.update(prefix_hash)
    return identity.digest()


@record
class KvPlacement:
    """A sealed segment of a sequence: positions ``first`` to ``first + ticket.tokens``."""

    first: int
    ticket: Ticket
    choices: tuple[int, ...] = ()
    """The choices whose positions these are; empty for all, as those of the prompt."""

    @property
    def end(self) -> int:
        return self.first + self.ticket.tokens


@record
class KnownSegment:
    """A segment of a prompt's prefix that an instance is believed to hold."""

    name: str
    """The address of the instance."""
    holder: str
    """The id that it reports."""
    key: bytes
    first: int
    tokens: int


@record
class SealedSegment:
    """A segment that its instance has sealed, with a lease for its reader (in the ticket) and one for the router."""

    placement: KvPlacement
    router_lease: bytes


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
