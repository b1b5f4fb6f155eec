"""Engines that compute nothing: they sleep for as long as a profile predicts.

For demonstrations and tests of scaling in real processes, where two cores add no real capacity. Sizes, limits and tensors are
those of the real model; embeddings are zeros, and answers repeat one token.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from triptych.domain.embedding import DType, Tensor, TensorSpec, embedding_tokens
from triptych.domain.engine import EngineOutput, EngineRequest, ScoredToken, Scores
from triptych.domain.generation import FinishReason
from triptych.domain.instance import ModelInfo
from triptych.domain.kv_segment import KvCopies, KvKind, KvSegment
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.domain.profile import (
    DecodeRow,
    EncodeRow,
    Measured,
    Origin,
    PrefillRow,
    PrepareRow,
    Profile,
    ProfileIdentity,
)
from triptych.domain.queue_position import QueuePosition
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.decoder.options import EngineOptions
from triptych.errors import ContextTooLong, InvalidRequest
from triptych.families.base import Family, shard_outputs
from triptych.machine.text.prefix_hashes import BlockHashes, KeyedItem, PrefixHashes
from triptych.policy.batching import Prefill, StepPlan, plan_step
from triptych.policy.costs import Costs
from triptych.policy.fairness import may_start
from triptych.ports import StopSignal
from triptych.runtime.profiles import the_profile

logger = logging.getLogger(__name__)

Work = Literal["prepare", "encode", "step", "copy"]
"""Preparation of an item on one core, a batch of the encoder, a step of the text engine, a copy of keys and values."""
Sleep = Callable[[float], None]
Length = Callable[[EngineRequest], int]
_BLOCK_TOKENS = 16
"""Tokens in a block of the prefix cache."""
_MANY_TOKENS = 1 << 20
"""KV memory where the profile does not say the size of a token."""
_COPIED_BYTES_PER_S = 8e9
"""Between KV cache and arena; about what one core copies."""


@dataclass(frozen=True, slots=True)
class DelayedItem:
    """``ports.PreparedItem``."""

    tokens: int
    outputs: tuple[TensorSpec, ...]
    nbytes: int


class DelayEncoderEngine:
    """``ports.EncoderEngine``; sleeps for the profile's load time at construction."""

    weights = None

    def __init__(
        self,
        model: ModelInfo,
        family: Family,
        costs: Costs,
        *,
        sleep: Sleep = time.sleep,
        bytes_per_pixel: float | None = None,
    ) -> None:
        """``bytes_per_pixel``: of undecoded items, where they come without their bytes."""
        self.model = model
        self.version = "delay"
        self.processor_digest = bytes(32)
        self._family = family
        self._costs = costs
        self._sleep = sleep
        self._bytes_per_pixel = bytes_per_pixel
        sleep(costs.profile.measured.load_s)

    def decoded_nbytes(self, info: MediaInfo, shard: Shard | None = None) -> int:
        del shard
        return 4 * (info.pixels + info.samples)

    def prepare(
        self, media: bytes, info: MediaInfo, shard: Shard | None = None, stop: StopSignal | None = None
    ) -> DelayedItem:
        del stop
        tokens, outputs = shard_outputs(self._family, info, self.model.dtype, shard)
        size = info.samples_or_pixels
        nbytes = len(media) if self._bytes_per_pixel is None else self._bytes_per_pixel * size
        self._spend("prepare", self._costs.prepare_s(nbytes, size).value, size)
        return DelayedItem(tokens, outputs, sum(spec.nbytes for spec in outputs))

    def encode(self, batch: Sequence[DelayedItem]) -> list[tuple[Tensor, ...]]:
        tokens = sum(embedding_tokens(item.outputs) for item in batch) / max(1, len(batch))
        self._spend("encode", self._costs.encode_s(tokens, len(batch)).value, len(batch))
        return [tuple(Tensor(spec, self._zeros(spec.nbytes)) for spec in item.outputs) for item in batch]

    def _spend(self, work: Work, seconds: float, size: int) -> None:
        """``size``: pixels or samples, or items."""
        del work, size
        self._sleep(seconds)

    def _zeros(self, nbytes: int) -> memoryview:
        return memoryview(bytes(nbytes))


@dataclass(slots=True)
class _Sequence:
    request: EngineRequest
    computed: int = 0
    """Tokens of the prompt and of ``begun`` that are computed; all choices share them."""
    sent: int = 0
    choices: tuple[int, ...] = ()
    begun: int = 0
    """Tokens that each choice had when it came."""
    length: int = 0
    """Tokens at which each choice ends by itself."""
    prefixes: list[bytes] = field(default_factory=list)
    """Hashes of the prompt's full blocks."""
    arriving: int = 0
    """Positions that come from elsewhere."""
    paused: bool = False

    @property
    def left(self) -> int:
        return len(self.request.token_ids) + self.begun - self.computed

    @property
    def is_arriving(self) -> bool:
        return self.computed < self.arriving

    @property
    def is_idle(self) -> bool:
        return self.paused or self.is_arriving

    @property
    def most_tokens(self) -> int:
        """KV memory that it may come to need."""
        return len(self.request.token_ids) + len(self.choices) * self.limit

    @property
    def limit(self) -> int:
        assert self.request.sampling.max_tokens is not None  # noqa: S101  # guaranteed by the port
        return self.request.sampling.max_tokens


class DelayTextEngine:
    """``ports.TextEngine`` and ``ports.DeviceSharing`` with chunked prefill; sleeps for the profile's load time at construction.

    Every answer has ``max_tokens`` tokens, or as many as ``length`` says if these are fewer. A request starts once KV memory has room for its
    prompt and its longest answers, so nothing is preempted. Keys and values are zeros.
    With ``prefix_tokens`` the prompts computed last, of so many tokens in all, are not computed again.
    """

    preemptions = 0
    kv_copies = KvCopies()
    weights = None

    def __init__(
        self,
        model: ModelInfo,
        family: Family,
        costs: Costs,
        options: EngineOptions,
        *,
        length: Length | None = None,
        prefix_tokens: int = 0,
        sleep: Sleep = time.sleep,
    ) -> None:
        token_nbytes = costs.profile.measured.kv_token_nbytes
        self.model = model
        self.kv_tokens = options.kv_cache_bytes // token_nbytes if token_nbytes else _MANY_TOKENS
        self.kv_block_tokens = 1
        heads_nbytes = 2 * model.dtype.itemsize
        head_size = token_nbytes // heads_nbytes or model.hidden_size
        kind = KvKind(model.revision, model.dtype, layers=1, heads=1, head_size=head_size)
        self.placeholder_ids = family.placeholder_ids
        self._costs = costs
        self._max_sequences = options.max_sequences
        self._token_budget = options.most_step_tokens
        self._length = length
        self._sleep = sleep
        self._token = next(token for token in range(16, model.context_length + 16) if token not in self.placeholder_ids)
        self._waiting: dict[str, _Sequence] = {}
        self._running: dict[str, _Sequence] = {}
        self.kv = DelayKvAccess(kind, self._waiting, self._running, self._token, self._copied, self._keep)
        self.finds_prefixes = prefix_tokens > 0
        self.prefix_queries_tokens = self.prefix_hits_tokens = 0
        self._most_prefixes = prefix_tokens // _BLOCK_TOKENS
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of blocks that are computed, in order of their last use."""
        sleep(costs.profile.measured.load_s)

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        del tokens
        return bool(tensors)

    @property
    def kv_free_tokens(self) -> int:
        held = (
            sequence.computed + len(sequence.choices) * (sequence.sent - sequence.begun)
            for sequence in self._running.values()
        )
        return max(0, self.kv_tokens - sum(held))

    def add(self, request: EngineRequest) -> None:
        if request.request_id in self._waiting or request.request_id in self._running:
            raise InvalidRequest(f"request {request.request_id!r} is in the engine already")
        begun = max(map(len, request.begun.values()))
        sequence = _Sequence(request, sent=begun, choices=tuple(request.begun), begun=begun)
        longest = min(self.model.context_length, self.kv_tokens)
        if len(request.token_ids) + sequence.limit > longest:
            raise ContextTooLong(
                f"prompt and answer have {len(request.token_ids) + sequence.limit} tokens of {longest}"
            )
        if len(sequence.choices) > self._max_sequences:
            raise InvalidRequest(f"n is {len(sequence.choices)}, must be at most {self._max_sequences}", param="n")
        sequence.arriving = min(request.arriving, len(request.token_ids) + begun - 1)
        sequence.length = sequence.limit if self._length is None else min(sequence.limit, max(1, self._length(request)))
        if self.finds_prefixes:
            sequence.prefixes = _prefixes(request)
        self._waiting[request.request_id] = sequence

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        for sequences in (self._waiting, self._running):
            sequence = sequences.get(request_id)
            if sequence is not None:
                sequence.choices = tuple(
                    number for number in sequence.choices if choice is not None and number != choice
                )
                if not sequence.choices:
                    del sequences[request_id]

    def reorder(self, request_id: str, queue_position: QueuePosition) -> None:
        if (sequence := self._waiting.get(request_id)) is not None:
            sequence.request = replace(sequence.request, queue_position=queue_position)

    @property
    def prefill_queue_position(self) -> QueuePosition | None:
        positions = [
            sequence.request.queue_position
            for sequence in self._running.values()
            if sequence.left and not sequence.is_idle
        ]
        startable = [
            sequence
            for sequence in self._waiting.values()
            if not sequence.paused and self._may_start(sequence, self._places(), 0)
        ]
        first = min(startable, key=lambda sequence: sequence.request.queue_position, default=None)
        if first is not None and (first.most_tokens <= self._unreserved_tokens() or not self._running):
            positions.append(first.request.queue_position)
        return min(positions, default=None)

    @property
    def can_step(self) -> bool:
        return self.prefill_queue_position is not None or any(
            not sequence.is_idle for sequence in self._running.values()
        )

    def _places(self) -> int:
        return sum(len(sequence.choices) for sequence in self._running.values())

    def step(self) -> list[EngineOutput]:
        return self._run(plan_step(self._decoding(), self._prompts(), token_budget=self._token_budget))

    def _prompts(self) -> Iterator[Prefill]:
        """Sequences that have begun and those for which there is a place, by their queue positions."""
        running, started_beyond = self._places(), 0
        begun = [sequence for sequence in self._running.values() if sequence.left and not sequence.is_idle]
        waiting = [sequence for sequence in self._waiting.values() if not sequence.paused]
        left_tokens = self._unreserved_tokens()
        for sequence in sorted([*begun, *waiting], key=lambda sequence: sequence.request.queue_position):
            if sequence.request.request_id in self._waiting:
                if not self._may_start(sequence, running, started_beyond):
                    continue
                if sequence.most_tokens > left_tokens and running:
                    left_tokens = 0  # nobody passes it
                    continue
                self._find(sequence)
                running += len(sequence.choices)
                left_tokens -= sequence.most_tokens
                started_beyond += sequence.request.queue_position.beyond_share * len(sequence.choices)
                if sequence.is_arriving:
                    self._start(sequence)
                    continue
            yield _prefill(sequence)

    def _unreserved_tokens(self) -> int:
        """KV memory that no running request may come to need."""
        return self.kv_tokens - sum(sequence.most_tokens for sequence in self._running.values())

    def _may_start(self, sequence: _Sequence, running: int, started_beyond: int) -> bool:
        wanted, queue_position = len(sequence.choices), sequence.request.queue_position
        return may_start(
            queue_position, wanted=wanted, running=running, places=self._max_sequences, begun=started_beyond
        )

    def decode_step(self) -> list[EngineOutput]:
        return self._run(StepPlan(tuple(self._decoding()), ()))

    def _decoding(self) -> list[str]:
        """Sequences that decode, with one entry per choice, as each takes a place."""
        decoding = [
            (name, sequence) for name, sequence in self._running.items() if not (sequence.left or sequence.is_idle)
        ]
        return [name for name, sequence in decoding for _ in sequence.choices]

    def _run(self, plan: StepPlan) -> list[EngineOutput]:
        contexts = [len(self._running[name].request.token_ids) + self._running[name].sent for name in plan.decodes]
        prompts = list[tuple[int, int]]()
        advanced = list(dict.fromkeys(plan.decodes))
        for work in plan.prefills:
            sequence = self._running.get(work.sequence_id) or self._start(self._waiting[work.sequence_id])
            prompts.append((work.tokens, sequence.computed))
            sequence.computed += work.tokens
            self._keep(sequence)
            if not sequence.left:
                advanced.append(work.sequence_id)
        if contexts or prompts:
            took_s = self._costs.step_s(len(contexts), sum(contexts) / max(1, len(contexts)), prompts).value
            self._spend("step", took_s, plan.tokens)
        return [output for name in advanced for output in self._advance(self._running[name])]

    def _copied(self, nbytes: int) -> None:
        self._spend("copy", nbytes / _COPIED_BYTES_PER_S, nbytes)

    def _spend(self, work: Work, seconds: float, size: int) -> None:
        """``size``: tokens, or bytes."""
        del work, size
        self._sleep(seconds)

    def _start(self, sequence: _Sequence) -> _Sequence:
        self._running[sequence.request.request_id] = self._waiting.pop(sequence.request.request_id)
        self.prefix_queries_tokens += sequence.computed + sequence.left if self.finds_prefixes else 0
        self.prefix_hits_tokens += sequence.computed
        return sequence

    def _find(self, sequence: _Sequence) -> None:
        """All but the last token may be known."""
        cached = 0
        for prefix in sequence.prefixes[: (sequence.left - 1) // _BLOCK_TOKENS]:
            if prefix not in self._prefixes:
                break
            self._prefixes.move_to_end(prefix)
            cached += 1
        sequence.computed = cached * _BLOCK_TOKENS

    def _keep(self, sequence: _Sequence) -> None:
        for prefix in sequence.prefixes[: sequence.computed // _BLOCK_TOKENS]:
            self._prefixes[prefix] = None
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > self._most_prefixes:
            self._prefixes.popitem(last=False)

    def _advance(self, sequence: _Sequence) -> list[EngineOutput]:
        sequence.sent += 1
        sequence.paused |= sequence.request.pauses
        reason = None
        if sequence.sent >= sequence.length:
            reason = FinishReason.LENGTH if sequence.sent >= sequence.limit else FinishReason.STOP
            del self._running[sequence.request.request_id]
        certain = ScoredToken(self._token, 0.0)
        scores = () if sequence.request.sampling.logprobs is None else (Scores(certain, ()),)
        return [
            EngineOutput(sequence.request.request_id, (self._token,), reason, choice=choice, scores=scores)
            for choice in sequence.choices
        ]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(self._waiting)

    @property
    def pending_tokens(self) -> int:
        going = [sequence for sequence in (*self._waiting.values(), *self._running.values()) if not sequence.paused]
        arriving = sum(max(0, sequence.arriving - sequence.computed) for sequence in going)
        return (
            sum(sequence.left + len(sequence.choices) * (sequence.limit - sequence.sent) for sequence in going)
            - arriving
        )

    @property
    def sharing(self) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class DelayKvAccess:
    """``ports.KvAccess``: keys and values are whatever the memory has. The choices of a request have one state."""

    kind: KvKind
    """As many bytes as the profile says, else those of one layer."""
    _waiting: Mapping[str, _Sequence]
    _running: Mapping[str, _Sequence]
    _token: int
    """Each token of an answer."""
    _on_copied: Callable[[int], None]
    """Takes the time of a copy of so many bytes."""
    _on_unpacked: Callable[[_Sequence], None]

    @property
    def awaiting(self) -> frozenset[tuple[str, int]]:
        arriving = (
            (name, sequence) for name, sequence in self._running.items() if sequence.is_arriving and not sequence.paused
        )
        return frozenset((name, sequence.choices[0]) for name, sequence in arriving)

    def pause(self, request_id: str) -> None:
        if (sequence := self._known(request_id)) is not None:
            sequence.paused = True

    def computed(self, request_id: str, choice: int) -> int:
        sequence = self._running.get(request_id)
        if sequence is None or choice not in sequence.choices:
            return 0
        return sequence.computed + max(0, sequence.sent - sequence.begun - 1)

    def prefix_hash(self, request_id: str, choice: int, end: int) -> bytes | None:
        sequence = self._known(request_id)
        if (
            sequence is None
            or choice not in sequence.choices
            or not all(item.key for item in sequence.request.embeddings)
        ):
            return None
        token_ids = (*sequence.request.token_ids, *sequence.request.begun[choice])
        token_ids += (self._token,) * (sequence.sent - sequence.begun)
        return PrefixHashes(_items(sequence.request), salt=sequence.request.tenant_salt).hash_before(end, token_ids)

    def pack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        if self.computed(request_id, choice) < segment.end:
            return False
        del memory
        self._on_copied(segment.nbytes)
        return True

    def unpack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        del memory
        if (request_id, choice) not in self.awaiting:
            return False
        sequence = self._running[request_id]
        if segment.first > sequence.computed or segment.end > sequence.computed + sequence.left:
            return False
        self._on_copied(segment.nbytes)
        sequence.computed = max(sequence.computed, min(segment.end, sequence.computed + sequence.left - 1))
        self._on_unpacked(sequence)
        return True

    def arrived(self, request_id: str) -> None:
        if (sequence := self._known(request_id)) is not None:
            sequence.arriving = 0

    def _known(self, request_id: str) -> _Sequence | None:
        return self._running.get(request_id) or self._waiting.get(request_id)


def delay_costs(path: Path, part: ModelPart) -> Costs:
    """The costs of the only profile of a part at ``path``, a file or a directory. Raises BadProfile."""
    profile = the_profile(path, part)
    logger.warning("the %s computes nothing: it sleeps as a profile predicts, and answers have no meaning", part.value)
    return Costs(profile)


def _prefixes(request: EngineRequest) -> list[bytes]:
    return BlockHashes(_BLOCK_TOKENS, request.token_ids, _items(request), salt=request.tenant_salt).hashes


def _items(request: EngineRequest) -> list[KeyedItem]:
    return [KeyedItem(span.key, tuple(range(span.start, span.start + span.tokens))) for span in request.embeddings]


def _prefill(sequence: _Sequence) -> Prefill:
    return Prefill(sequence.request.request_id, sequence.left, sequence.computed, sequences=len(sequence.choices))


def synthetic_encoder_profile(
    *, pass_s: float, token_s: float, load_s: float, prepare_s: float = 1e-6, digest: str = "0" * 64
) -> Profile:
    """A pass costs ``pass_s`` and ``token_s`` per embedding token; an item ``prepare_s`` on one core."""
    return Profile(
        ProfileIdentity(ModelPart.ENCODER, digest, frozenset({Stage.ENCODE}), "synthetic", DType.F32),
        Measured(Origin.SYNTHETIC, "", method="synthetic", load_s=load_s, start_s=load_s),
        encode=tuple(
            EncodeRow(tokens, items, pass_s + token_s * tokens * items) for tokens in (1, 65536) for items in (1, 64)
        ),
        prepare=tuple(
            PrepareRow(density * pixels, pixels, prepare_s) for density in (0, 64) for pixels in (1, 1 << 26)
        ),
    )


def synthetic_decoder_profile(
    *, step_s: float, sequence_s: float, prefill_token_s: float, load_s: float, digest: str = "0" * 64
) -> Profile:
    """A step costs ``step_s``, and ``sequence_s`` per decoded sequence or ``prefill_token_s`` per prompt token."""
    return Profile(
        ProfileIdentity(ModelPart.DECODER, digest, frozenset({Stage.PREFILL, Stage.DECODE}), "synthetic", DType.F32),
        Measured(Origin.SYNTHETIC, "", method="synthetic", load_s=load_s, start_s=load_s),
        prefill=tuple(
            PrefillRow(new, cached, step_s + prefill_token_s * new) for new in (1, 65536) for cached in (0, 65536)
        ),
        decode=tuple(
            DecodeRow(batch, context, step_s + sequence_s * batch) for batch in (1, 1024) for context in (1, 65536)
        ),
    )


def synthetic_profiles(
    model: Path,
    *,
    image_s: float = 0.2,
    side_px: int = 448,
    prompt_token_s: float = 0.0005,
    step_s: float = 0.01,
    load_s: float = 5.0,
    process_s: float = 3.0,
) -> tuple[Profile, Profile]:
    """Profiles of the encoder and the decoder of a model directory, for engines that sleep. Raises BadModel.

    An image of ``side_px`` alone takes ``image_s`` to encode, a tenth of it for the pass itself: so an encoder bears about
    1 / ``image_s`` such images per second, whatever the family. A step of the decoder takes ``step_s``, with
    ``prompt_token_s`` more per prompt token, and a tenth of ``step_s`` per sequence. Engines load for ``load_s``; the rest
    of a process's start is put at ``process_s``.
    """
    checkpoint = open_checkpoint(model)
    image = MediaInfo(Modality.IMAGE, "png", side_px, side_px, 0, bytes(32))
    tokens = embedding_tokens(checkpoint.family.outputs(image, DType.F32))
    profiles = (
        synthetic_encoder_profile(
            pass_s=0.1 * image_s,
            token_s=0.9 * image_s / tokens,
            load_s=load_s,
            digest=checkpoint.part_digest(ModelPart.ENCODER),
        ),
        synthetic_decoder_profile(
            step_s=step_s,
            sequence_s=0.1 * step_s,
            prefill_token_s=prompt_token_s,
            load_s=load_s,
            digest=checkpoint.part_digest(ModelPart.DECODER),
        ),
    )
    encoder, decoder = (
        replace(profile, measured=replace(profile.measured, start_s=load_s + process_s)) for profile in profiles
    )
    return encoder, decoder
