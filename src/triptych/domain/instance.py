"""Instances: processes with an engine, their description, and their load."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from triptych.domain.embedding import DType
from triptych.domain.embedding_hints import EmbeddingHints
from triptych.domain.lora import LoadedLora
from triptych.domain.profile import ProfileIdentity
from triptych.domain.record import record
from triptych.domain.stage import ModelPart, Role, Stage

MAX_FAULT = 500
"""Characters of why a stage could not be opened."""


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """Offer of one way to read an instance's arena. ``metadata`` is opaque to all but the backend. ``host`` identifies
    the machine (it is no address), so that shared-memory backends know whether both sides share it.
    """

    backend: str
    host: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that an instance serves. Instances work together only if all fields are equal."""

    model_id: str
    revision: str
    """Digest over the files that determine the output."""
    dtype: DType
    hidden_size: int
    context_length: int
    parent: str = ""
    """Of a LoRA adapter that is served as a model: the id of its base. Empty for a model of its own."""

    def with_lora(self, lora: LoadedLora) -> "ModelInfo":
        """The model that this one is with an adapter."""
        return replace(self, model_id=lora.name, revision=lora.digest, parent=self.model_id)


@dataclass(frozen=True, slots=True)
class ServedPart:
    """A part of the model in an instance: what its profile is found by, and the limits of its batches."""

    identity: ProfileIdentity
    max_batch: int
    """Items in one pass of an encoder; sequences in one step of a decoder."""
    token_budget: int = 0
    """Tokens in one step of a decoder."""
    prepare_cores: int = 0
    """Cores that decode and preprocess items for an encoder."""


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """An instance's description of itself. A restarted process has another ``epoch``."""

    instance_id: str
    epoch: int
    role: Role
    """Role at the start of the epoch."""
    model: ModelInfo
    arena_bytes: int
    """Size of the arena that holds its embeddings, or, without an encoder, of the arena it pulls into."""
    offers: tuple[TransportOffer, ...]
    encoder_version: str = ""
    """Version of the encoding software, part of an embedding's identity. Empty without an encoder."""
    max_items: int = 0
    """Limit on concurrent items of an encoder; 0 if unknown."""
    kv_tokens: int = 0
    """Token capacity of a text instance's KV memory (prompt and answer, per choice); 0 if unknown."""
    parts: tuple[ServedPart, ...] = ()
    """Parts of the model that it runs; empty if unknown."""
    continues: bool = False
    """Whether it goes on with answers that another instance began (``TextRequest.continued``)."""
    prefills_early: bool = False
    """Whether it finds prefixes of prompts that it has computed (``TextRequest.early``)."""
    kv_kind: str = ""
    """Digest of the kind of its keys and values (``SegmentKind.digest``): it takes segments of the same kind. Empty if it takes none."""
    transfers_kv: bool = False
    """Whether it can hand answers over (``TextRequest.transfers_kv``)."""
    switchable: Role | None = None
    """The widest role that it can switch to: it serves the stages of its last load report. None if it always serves its role."""
    kv_segment_tokens: int = 0
    """Positions of a whole segment of keys and values (``SegmentKind.segment_tokens``); 0 if it shares no prefixes."""
    kv_position_bytes: int = 0
    """Bytes of one position."""
    kv_block_tokens: int = 0
    """Tokens of a block, in which each choice takes ``kv_tokens``; 0 if unknown."""


@record
class StageLoad:
    """The load of one stage of an instance.

    If prefill and decode share a batch, prefill counts waiting requests and decode those in the batch.
    """

    pending_tokens: int
    """Tokens still to encode; prompt tokens of requests that have no first token yet; the most that may still be decoded."""
    pending: int
    """Items at the encode stage, requests at the others."""
    leased_bytes: int = 0
    """Arena bytes that cannot be reclaimed: leased, being written, or in quarantine. At the encode stage, and at the prefill stage
    of an instance that transfers."""
    free_tokens: int | None = None
    """KV memory for so many tokens is free. Decode stage only; None if unknown."""
    served: int | None = None
    """Number of items or requests of which the stage has computed what they came for since it opened, for an instance
    that switches. None if unknown.
    """


@dataclass(frozen=True, slots=True)
class ClosedStage:
    """A stage that an instance could open, and what that takes."""

    stage: Stage
    opens_s: float = 0.0
    """Time to load weights before the stage opens, about, seconds; 0 where they are in memory."""
    fault: str = ""
    """Why it could not be opened when that was ordered last; empty if it could, or was not ordered."""


@record
class InstanceLimits:
    """Limits of the batches of an instance. None: in a report, it has no such batches; in an order, as at its start."""

    max_batch_items: int | None = None
    """Items in one pass of an encoder."""
    max_sequences: int | None = None
    """Sequences in one step of a decoder."""
    token_budget: int | None = None
    """Tokens in one step of a decoder."""

    def over(self, below: "InstanceLimits") -> "InstanceLimits":
        """These limits, with those of ``below`` where there are none."""
        return InstanceLimits(
            below.max_batch_items if self.max_batch_items is None else self.max_batch_items,
            below.max_sequences if self.max_sequences is None else self.max_sequences,
            below.token_budget if self.token_budget is None else self.token_budget,
        )

    @property
    def given(self) -> Mapping[str, int]:
        """The limits that are not None, by name."""
        named = {
            "max_batch_items": self.max_batch_items,
            "max_sequences": self.max_sequences,
            "token_budget": self.token_budget,
        }
        return {name: value for name, value in named.items() if value is not None}

    def beyond(self, known: "InstanceLimits") -> tuple[str, ...]:
        """Names of the given limits that are not among the ``known`` ones."""
        return tuple(name for name in self.given if name not in known.given)

    def __str__(self) -> str:
        """Those that are given: ``max_sequences 64, token_budget 512``."""
        return ", ".join(f"{name} {value}" for name, value in self.given.items()) or "as at the start"

    def of(self, part: ServedPart) -> ServedPart:
        """The part with these limits instead of those at the start."""
        if part.identity.part is ModelPart.ENCODER:
            return part if self.max_batch_items is None else replace(part, max_batch=self.max_batch_items)
        return replace(
            part,
            max_batch=part.max_batch if self.max_sequences is None else self.max_sequences,
            token_budget=part.token_budget if self.token_budget is None else self.token_budget,
        )


@record
class LimitsReport:
    """Limits of the batches of an instance that can change while it runs."""

    limits: InstanceLimits
    """In use."""
    version: int = 0
    """Version of the last order in this epoch; 0 without one."""
    by_hand: bool = False
    """Whether a person gave that order."""
    fault: str = ""
    """Why that order was not obeyed; empty if it was."""


@record
class InstanceLoad:
    """Load report of an instance: the load of every stage that takes work. Of an instance that switches these are the
    open ones.
    """

    stages: Mapping[Stage, StageLoad]
    draining: bool = False
    hints: EmbeddingHints | None = None
    """Changes of the embeddings that it holds. None without a change, and where it does not say."""
    stages_version: int = 0
    """Version of the last order to switch in this epoch; 0 without one."""
    closed: tuple[ClosedStage, ...] = ()
    """Closed stages of an instance that switches, which it could open, where there is something to report."""
    limits: LimitsReport | None = None
    """Limits of its batches. None where they cannot change while it runs."""
    loras: tuple[LoadedLora, ...] = ()
    """The LoRA adapters that it takes requests for, by name."""

    def at(self, stage: Stage) -> StageLoad:
        return self.stages.get(stage, _NO_LOAD)


_NO_LOAD = StageLoad(0, 0)
