"""Embeddings: their identity, their tensors, and the tickets and leases with which they are pulled.

An embedding is stored in the arena of one holder. A *ticket* says where. The *lease* in it is the holder's promise to
one reader to keep the bytes there for a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from math import prod
from typing import NamedTuple

from triptych.domain.media import MediaInfo, Shard
from triptych.domain.record import record

KEY_NBYTES = 32
LEASE_ID_NBYTES = 16
"""Random, as a lease's id grants read access."""


class DType(Enum):
    """Element types of exchanged tensors; the values are safetensors' names."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    I64 = "I64"
    I32 = "I32"
    U8 = "U8"
    BOOL = "BOOL"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python on every lookup

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.I64: 8,
    DType.I32: 4,
    DType.U8: 1,
    DType.BOOL: 1,
}


@dataclass(frozen=True, slots=True)
class EmbeddingIdentity:
    """Identity that covers everything that an embedding depends on: items, or shards, of equal identity have equal
    embeddings.

    The key is the full 32-byte digest over all fields. Each is prefixed with its length, so that distinct identities
    cannot have equal input to the hash.
    """

    model_id: str
    model_revision: str
    encoder_version: str
    processor_digest: bytes
    dtype: DType
    media: MediaInfo
    """Includes the digest of the encoded bytes."""
    shard: Shard | None = None
    """The part of the item that is encoded; None for the whole item."""
    tenant_salt: bytes = b""

    @property
    def key(self) -> bytes:
        fields: list[bytes] = [
            self.model_id.encode(),
            self.model_revision.encode(),
            self.encoder_version.encode(),
            self.processor_digest,
            self.dtype.value.encode(),
            *_media_fields(self.media),
            b"" if self.shard is None else f"{self.shard.first}+{self.shard.count}/{self.shard.of}".encode(),
            self.tenant_salt,
        ]
        digest = blake2b(digest_size=KEY_NBYTES, person=b"triptych-item")
        for field in fields:
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
        return digest.digest()


def whole_key(keys: Sequence[bytes]) -> bytes:
    """The key of an item whose shards have these."""
    return blake2b(b"".join(keys), digest_size=KEY_NBYTES, person=b"triptych-whole").digest()


def _media_fields(media: MediaInfo) -> tuple[bytes, ...]:
    return (
        media.modality.value.encode(),
        media.format.encode(),
        f"{media.width}x{media.height} {media.rotation_deg}".encode(),
        f"{media.frames} {media.duration_s!r}".encode(),
        f"{media.samples} {media.sample_rate_hz}".encode(),
        media.digest,
        str(len(media.options)).encode(),
        *(part.encode() for option in sorted(media.options) for part in option),
    )


EMBEDS = "embeds"
"""Name of the tensor [tokens, hidden size] whose rows replace an item's placeholders."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named, dense, row-major tensor. ``shape`` is in elements; dimensions may be zero."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEMSIZE[self.dtype]


def embedding_tokens(tensors: Sequence[TensorSpec]) -> int:
    """Rows of an item's embedding: the unit in which load, profiles and capacities of encoders are counted.

    Families with cross-attention have one position in the prompt for all rows, so positions say nothing about the work.
    """
    return prod(tensors[0].shape[:-1])


def with_rows(tensors: Sequence[TensorSpec], rows: int) -> tuple[TensorSpec, ...]:
    """The same tensors with ``rows`` rows, as a shard has."""
    return tuple(replace(spec, shape=(rows, *spec.shape[1:])) for spec in tensors)


def joined(parts: Sequence[tuple[TensorSpec, ...]]) -> tuple[TensorSpec, ...]:
    """The specs of tensors concatenated along their rows. Raises ValueError if they do not match."""
    if len(parts) == 1:
        return parts[0]
    wholes: list[TensorSpec] = []
    for specs in zip(*parts, strict=True):
        first = specs[0]
        if any((spec.name, spec.dtype, spec.shape[1:]) != (first.name, first.dtype, first.shape[1:]) for spec in specs):
            raise ValueError(f"tensors cannot be concatenated: {specs}")
        if not all(spec.shape for spec in specs):
            raise ValueError(f"tensor {first.name!r} has no rows")
        wholes.append(replace(first, shape=(sum(spec.shape[0] for spec in specs), *first.shape[1:])))
    return tuple(wholes)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's spec and its bytes (read-only, C-contiguous, ``spec.nbytes`` long)."""

    spec: TensorSpec
    data: memoryview

    def __post_init__(self) -> None:
        if not self.data.c_contiguous:
            raise ValueError(f"tensor {self.spec.name!r} is not contiguous")
        if self.data.nbytes != self.spec.nbytes:
            raise ValueError(
                f"tensor {self.spec.name!r} has {self.data.nbytes} bytes, its shape and dtype say {self.spec.nbytes}"
            )


class HolderRef(NamedTuple):
    """Incarnation of an instance that holds embeddings, and its address (``HOST:PORT``)."""

    address: str
    instance_id: str
    epoch: int


LeaseId = bytes
"""16 random bytes; knowing them grants read access to the embedding while the lease lasts."""


@record
class Ticket:
    """Place of an embedding and how to pull it. A ticket is a capability and must be kept secret.

    The payload is the tensors' bytes, each tensor aligned to ``TENSOR_ALIGNMENT``. In the holder's arena two copies of
    the 8-byte generation enclose it: ``generation | payload | generation``.
    """

    key: bytes
    holder: str
    epoch: int
    offset: int
    """Offset of the slot (its leading generation word) in the holder's arena, in bytes."""
    payload_nbytes: int
    generation: int
    checksum: int
    """XXH3-64 of the payload."""
    tensors: tuple[TensorSpec, ...]
    tokens: int
    """Prompt positions that the item fills, as computed by the encoder."""
    lease_id: LeaseId
    lease_s: float
    """Duration of the lease, from when the holder granted it."""
    address: str = ""
    """``HOST:PORT`` of the holder. The router adds it, as a holder does not know how others reach it."""

    def at(self, address: str) -> "Ticket":
        """A copy with the holder's address."""
        return Ticket(
            self.key,
            self.holder,
            self.epoch,
            self.offset,
            self.payload_nbytes,
            self.generation,
            self.checksum,
            self.tensors,
            self.tokens,
            self.lease_id,
            self.lease_s,
            address,
        )

    @property
    def held_by(self) -> HolderRef:
        return HolderRef(self.address, self.holder, self.epoch)

    @property
    def slot_nbytes(self) -> int:
        return self.payload_nbytes + 2 * GENERATION_NBYTES


GENERATION_NBYTES = 8
TENSOR_ALIGNMENT = 64


def align(nbytes: int, alignment: int = TENSOR_ALIGNMENT) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


def tensor_offsets(tensors: tuple[TensorSpec, ...]) -> tuple[int, ...]:
    """Byte offset of each tensor within a payload that holds them in this order."""
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        start = -(-end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        offsets.append(start)
        end = start + prod(tensor.shape) * _ITEMSIZE[tensor.dtype]
    return tuple(offsets)


def payload_nbytes(tensors: tuple[TensorSpec, ...]) -> int:
    """Size of a payload that holds these tensors in this order."""
    end = 0
    for tensor in tensors:
        end = -(-end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT + prod(tensor.shape) * _ITEMSIZE[tensor.dtype]
    return end


def slot_nbytes(tensors: tuple[TensorSpec, ...]) -> int:
    """Arena bytes of an embedding with these tensors, including generation words."""
    return align(payload_nbytes(tensors) + 2 * GENERATION_NBYTES)
