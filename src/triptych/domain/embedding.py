"""Embeddings: their identity, the tensors they consist of, and the tickets and leases by which they are pulled.

An embedding lies in the arena of one holder. A *ticket* says where; the *lease* in it is the
holder's promise to one reader to keep the bytes there for a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from math import prod
from typing import NamedTuple

from triptych.domain.media import MediaInfo, Shard

KEY_NBYTES = 32
LEASE_ID_NBYTES = 16
"""Random, as whoever knows a lease's id may read by it."""


class DType(Enum):
    """Element types that cross the boundary; the value is what safetensors calls them."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    I64 = "I64"
    I32 = "I32"
    U8 = "U8"
    BOOL = "BOOL"

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
    """Everything that an embedding depends on: two items, or shards, with equal identity have equal embeddings.

    The key is the whole 32-byte digest over all fields, each with its length in front, so that neither a truncated
    hash nor fields that run into each other can make two different items equal.
    """

    model_id: str
    model_revision: str
    encoder_version: str
    processor_digest: bytes
    dtype: DType
    media: MediaInfo
    """With the digest of the bytes that are encoded."""
    shard: Shard | None = None
    """The part of the item that is encoded; None for all of it."""
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
"""Name of the tensor [tokens, hidden size] whose rows take the places of an item's placeholders."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named, dense, row-major tensor. ``shape`` is in elements; a size of zero in any dimension is allowed."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEMSIZE[self.dtype]


def with_rows(tensors: Sequence[TensorSpec], rows: int) -> tuple[TensorSpec, ...]:
    """The same tensors with so many rows: what a shard of their item has."""
    return tuple(replace(spec, shape=(rows, *spec.shape[1:])) for spec in tensors)


def joined(parts: Sequence[tuple[TensorSpec, ...]]) -> tuple[TensorSpec, ...]:
    """What tensors of several parts are when each stands behind those of the part before, row by row.

    Raises ValueError where they do not fit.
    """
    wholes: list[TensorSpec] = []
    for specs in zip(*parts, strict=True):
        first = specs[0]
        if any((one.name, one.dtype, one.shape[1:]) != (first.name, first.dtype, first.shape[1:]) for one in specs):
            raise ValueError(f"tensors of several parts do not fit behind each other: {specs}")
        if not all(one.shape for one in specs):
            raise ValueError(f"tensor {first.name!r} has no rows")
        wholes.append(replace(first, shape=(sum(one.shape[0] for one in specs), *first.shape[1:])))
    return tuple(wholes)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's description together with its bytes (read-only, C-contiguous, ``spec.nbytes`` long)."""

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
    """One incarnation of an instance that holds embeddings, and where it is called (``HOST:PORT``)."""

    address: str
    instance_id: str
    epoch: int


LeaseId = bytes
"""16 random bytes; whoever knows them may read the embedding while the lease lasts."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where an embedding lies and how to pull it: a capability, to be kept secret like one.

    The payload is the tensors' bytes one after another, each starting at a multiple of ``TENSOR_ALIGNMENT``. In the
    holder's arena it stands between two copies of the 8-byte generation: ``generation | payload | generation``.
    """

    key: bytes
    holder: str
    epoch: int
    offset: int
    """Of the slot (its leading generation word) in the holder's arena, in bytes."""
    payload_nbytes: int
    generation: int
    checksum: int
    """XXH3-64 of the payload."""
    tensors: tuple[TensorSpec, ...]
    tokens: int
    """Prompt positions the item takes: the truth, where a header could only estimate."""
    lease_id: LeaseId
    lease_s: float
    """For how long the lease lasts, counted by the holder from when it granted it."""
    address: str = ""
    """``HOST:PORT`` of the holder. A holder does not know how others reach it: the router adds it for the text instance."""

    @property
    def held_by(self) -> HolderRef:
        return HolderRef(self.address, self.holder, self.epoch)

    @property
    def slot_nbytes(self) -> int:
        return self.payload_nbytes + 2 * GENERATION_NBYTES

    @property
    def tensor_offsets(self) -> tuple[int, ...]:
        """Where each tensor starts within the payload, in bytes."""
        return tensor_offsets(self.tensors)


GENERATION_NBYTES = 8
TENSOR_ALIGNMENT = 64


def align(nbytes: int, alignment: int = TENSOR_ALIGNMENT) -> int:
    """The smallest multiple of ``alignment`` that is at least ``nbytes``."""
    return -(-nbytes // alignment) * alignment


def tensor_offsets(tensors: tuple[TensorSpec, ...]) -> tuple[int, ...]:
    """Where each tensor starts within a payload that holds them in this order, in bytes."""
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        start = align(end)
        offsets.append(start)
        end = start + tensor.nbytes
    return tuple(offsets)


def payload_nbytes(tensors: tuple[TensorSpec, ...]) -> int:
    """Bytes of a payload that holds these tensors in this order."""
    end = 0
    for tensor in tensors:
        end = align(end) + tensor.nbytes
    return end
