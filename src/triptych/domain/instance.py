"""Instances: processes with an engine, what they say of themselves, and how loaded they are."""

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.domain.embedding import DType
from triptych.domain.stage import Role, Stage


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
    """Of the arena that its embeddings lie in; of an instance that makes none, of the one that it pulls into."""
    offers: tuple[TransportOffer, ...]
    encoder_version: str = ""
    """Of the software that makes embeddings: part of their identity. Empty for instances that make none."""
    max_items: int = 0
    """Most items that an encoder takes at the same time; 0 where it does not say."""
    kv_tokens: int = 0
    """Most tokens that a text instance keeps: prompt and answer, once for each choice; 0 where it does not say."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What waits or runs at one stage of an instance now.

    Where prefill and decode share a batch, prefill counts the requests that wait for it, decode those that are in it.
    """

    pending_tokens: int
    """To be encoded, prefilled or decoded."""
    pending: int
    """Items at the encode stage, requests at the others."""
    leased_bytes: int = 0
    """Arena bytes that cannot be reclaimed now: leased, being written, or in quarantine. Only the encode stage has any."""


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """One report: the load of every stage that the instance serves."""

    stages: Mapping[Stage, StageLoad]
    draining: bool = False

    def at(self, stage: Stage) -> StageLoad:
        return self.stages.get(stage, _NO_LOAD)


_NO_LOAD = StageLoad(0, 0)
