"""Instances: processes with one engine each, what they say of themselves, and how loaded they are."""

from dataclasses import dataclass

from triptych.domain.embedding import DType
from triptych.domain.stage import Role


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """One way to read an instance's arena, or to be the reader of another's.

    ``metadata`` is the backend's own, opaque to everyone else. ``host`` names the machine (not an address), so that
    backends which need one machine know whether they are on it.
    """

    backend: str
    host: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that an instance serves. Two instances work together only where all of this is equal."""

    model_id: str
    revision: str
    """Digest over the files that decide what comes out: equal files, equal revision."""
    dtype: DType
    hidden_size: int
    context_length: int


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What an instance says of itself when it is asked. A restarted process has another ``epoch``."""

    instance_id: str
    epoch: int
    role: Role
    model: ModelInfo
    arena_bytes: int
    offers: tuple[TransportOffer, ...]
    encoder_version: str = ""
    """Of the software that makes embeddings: part of their identity. Empty for instances that make none."""
    max_items: int = 0
    """Most items that an encoder takes at the same time; 0 where it does not say."""
    kv_tokens: int = 0
    """Most tokens that a text instance keeps: prompt and answer, once for each choice; 0 where it does not say."""


@dataclass(frozen=True, slots=True)
class EncoderLoad:
    """What waits or runs at an encoder now."""

    pending_tokens: int
    pending_items: int
    arena_bytes: int
    arena_leased_bytes: int
    """Bytes that cannot be reclaimed now: leased, being written, or in quarantine."""
    cached_embeddings: int
    draining: bool = False

    @property
    def arena_available_bytes(self) -> int:
        return self.arena_bytes - self.arena_leased_bytes


@dataclass(frozen=True, slots=True)
class TextLoad:
    """What waits or runs at a text instance now. Tokens are prompt tokens not yet prefilled plus tokens to decode."""

    pending_tokens: int
    waiting_requests: int
    running_requests: int
    draining: bool = False
