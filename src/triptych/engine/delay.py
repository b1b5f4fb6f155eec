"""Engines that compute nothing: they sleep for as long as a profile predicts.

For demonstrations and tests of scaling in real processes, where two cores add no real capacity. Sizes, limits and tensors are
those of the real model; embeddings are zeros, and answers repeat one token.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from triptych.machine.text.counted_batch import CountedBatch, CountedSequence, CountedStep
from triptych.machine.text.prefix_hashes import BlockHashes, KeyedItem, PrefixHashes
from triptych.policy.costs import Costs
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
    loras = None

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


@dataclass(eq=False, slots=True, kw_only=True)
class _Sequence(CountedSequence):
    request: EngineRequest
    prefixes: Sequence[bytes] = ()
    """Hashes of the prompt's full blocks."""


class DelayTextEngine:
    """``ports.TextEngine`` and ``ports.DeviceSharing`` with chunked prefill; sleeps for the profile's load time at construction.

    Every answer has ``max_tokens`` tokens, or as many as ``length`` says if these are fewer. A request starts once KV memory has room for its
    prompt and its longest answers, so nothing is preempted. Keys and values are zeros.
    With ``prefix_tokens`` the prompts computed last, of so many tokens in all, are not computed again.
    """

    preemptions = 0
    kv_copies = KvCopies()
    weights = None
    loras = None

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
        self.model = model
        self.kv_tokens, kind = kv_memory(model, costs, options)
        self.kv_block_tokens = 1
        self.placeholder_ids = family.placeholder_ids
        self._costs = costs
        self._most_choices = options.max_sequences
        self.most_sequences = self.most_tokens = options.most_step_tokens
        self._length = length
        self._sleep = sleep
        self._token = next(token for token in range(16, model.context_length + 16) if token not in self.placeholder_ids)
        self._batch: CountedBatch[_Sequence] = CountedBatch(
            kv_tokens=self.kv_tokens,
            max_sequences=options.max_sequences,
            token_budget=options.most_step_tokens,
            by_arrival=options.engine == "vllm",
            known=self._find,
        )
        self.kv = DelayKvAccess(kind, self._batch, self._token, self._exported, self._copied, self._keep)
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
        return self._batch.free_tokens

    def add(self, request: EngineRequest) -> None:
        if self._batch.find(request.request_id) is not None:
            raise InvalidRequest(f"request {request.request_id!r} is in the engine already")
        limit = request.sampling.max_tokens
        assert limit is not None  # noqa: S101  # guaranteed by the port
        longest = min(self.model.context_length, self.kv_tokens)
        if len(request.token_ids) + limit > longest:
            raise ContextTooLong(f"prompt and answer have {len(request.token_ids) + limit} tokens of {longest}")
        if len(request.begun) > self._most_choices:
            raise InvalidRequest(f"n is {len(request.begun)}, must be at most {self._most_choices}", param="n")
        self._batch.add(
            _Sequence(
                request_id=request.request_id,
                prompt_tokens=len(request.token_ids),
                limit=limit,
                length=limit if self._length is None else min(limit, max(1, self._length(request))),
                choices=tuple(request.begun),
                begun=max(map(len, request.begun.values())),
                queue_position=request.queue_position,
                arriving=request.arriving,
                pauses=request.pauses,
                request=request,
                prefixes=_prefixes(request) if self.finds_prefixes else (),
            )
        )

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        self._batch.cancel(request_id, choice)

    def reorder(self, request_id: str, queue_position: QueuePosition) -> None:
        self._batch.reorder(request_id, queue_position)

    @property
    def prefill_queue_position(self) -> QueuePosition | None:
        return self._batch.prefill_queue_position

    @property
    def can_step(self) -> bool:
        return self._batch.can_step

    def step(self) -> list[EngineOutput]:
        return self._run(self._batch.begin())

    def decode_step(self) -> list[EngineOutput]:
        return self._run(self._batch.begin(prefill=False))

    def _run(self, step: CountedStep[_Sequence]) -> list[EngineOutput]:
        for sequence in step.computing:
            self._keep(sequence)
        if step.tokens:
            took_s = self._costs.step_seconds(step.decodes, step.mean_context, step.prompts)
            self._spend("step", took_s, step.tokens)
        return [output for sequence in self._batch.end(step) for output in self._outputs(sequence)]

    def _exported(self, sequence: CountedSequence, segment: KvSegment) -> None:
        """A segment was copied out of KV memory."""
        del sequence
        self._copied(segment.nbytes)

    def _copied(self, nbytes: int) -> None:
        self._spend("copy", nbytes / _COPIED_BYTES_PER_S, nbytes)

    def _spend(self, work: Work, seconds: float, size: int) -> None:
        """``size``: tokens, or bytes."""
        del work, size
        self._sleep(seconds)

    def _find(self, sequence: _Sequence) -> int:
        """All but the last token may be known."""
        cached = 0
        for prefix in sequence.prefixes[: (sequence.left - 1) // _BLOCK_TOKENS]:
            if prefix not in self._prefixes:
                break
            self._prefixes.move_to_end(prefix)
            cached += 1
        self.prefix_queries_tokens += sequence.left if self.finds_prefixes else 0
        self.prefix_hits_tokens += cached * _BLOCK_TOKENS
        return cached * _BLOCK_TOKENS

    def _keep(self, sequence: _Sequence) -> None:
        for prefix in sequence.prefixes[: sequence.computed // _BLOCK_TOKENS]:
            self._prefixes[prefix] = None
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > self._most_prefixes:
            self._prefixes.popitem(last=False)

    def _outputs(self, sequence: _Sequence) -> list[EngineOutput]:
        reason = None
        if sequence.has_ended:
            reason = FinishReason.LENGTH if sequence.sent >= sequence.limit else FinishReason.STOP
        certain = ScoredToken(self._token, 0.0)
        scores = () if sequence.request.sampling.logprobs is None else (Scores(certain, ()),)
        return [
            EngineOutput(sequence.request_id, (self._token,), reason, choice=choice, scores=scores)
            for choice in sequence.choices
        ]

    @property
    def has_work(self) -> bool:
        return self._batch.has_work

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(self._batch.waiting)

    @property
    def pending_tokens(self) -> int:
        return self._batch.pending_tokens

    @property
    def sharing(self) -> Self:
        return self

    @property
    def steps(self) -> Self:
        return self

    @property
    def max_sequences(self) -> int:
        return self._batch.max_sequences

    @property
    def token_budget(self) -> int:
        return self._batch.token_budget

    def limit_steps(self, max_sequences: int, token_budget: int) -> None:
        self._batch.limit(max_sequences, token_budget)


@dataclass(frozen=True, slots=True)
class DelayKvAccess:
    """``ports.KvAccess``: keys and values are whatever the memory has. The choices of a request have one state."""

    kind: KvKind
    _batch: CountedBatch[_Sequence]
    _token: int
    """Each token of an answer."""
    _on_packed: Callable[[_Sequence, KvSegment], None]
    """Takes the time of a copy out of KV memory."""
    _on_copied: Callable[[int], None]
    """Takes that of a copy of so many bytes into it."""
    _on_unpacked: Callable[[_Sequence], None]

    @property
    def awaiting(self) -> frozenset[tuple[str, int]]:
        return frozenset((name, sequence.choices[0]) for name, sequence in self._batch.awaiting.items())

    def pause(self, request_id: str) -> None:
        self._batch.pause(request_id)

    def computed(self, request_id: str, choice: int) -> int:
        sequence = self._batch.running.get(request_id)
        return 0 if sequence is None or choice not in sequence.choices else sequence.positions

    def prefix_hash(self, request_id: str, choice: int, end: int) -> bytes | None:
        sequence = self._batch.find(request_id)
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
        self._on_packed(self._batch.running[request_id], segment)
        return True

    def unpack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        del memory
        if (request_id, choice) not in self.awaiting:
            return False
        sequence = self._batch.running[request_id]
        if segment.first > sequence.computed or segment.end > sequence.computed + sequence.left:
            return False
        self._on_copied(segment.nbytes)
        self._batch.arrive(sequence, segment.end)
        self._on_unpacked(sequence)
        return True

    def arrived(self, request_id: str) -> None:
        self._batch.end_arrival(request_id)


def kv_memory(model: ModelInfo, costs: Costs, options: EngineOptions) -> tuple[int, KvKind]:
    """The positions that KV memory has room for, and the kind of what is in it: as many bytes as the profile says, else those of one layer."""
    token_nbytes = costs.profile.measured.kv_token_nbytes
    head_size = token_nbytes // (2 * model.dtype.itemsize) or model.hidden_size
    kind = KvKind(model.revision, model.dtype, layers=1, heads=1, head_size=head_size)
    return options.kv_cache_bytes // token_nbytes if token_nbytes else _MANY_TOKENS, kind


def delay_costs(path: Path, part: ModelPart, degree: int = 1) -> Costs:
    """The costs of the only profile of a part at ``path``, a file or a directory, or of that with this tensor-parallel degree. Raises
    BadProfile.
    """
    profile = the_profile(path, part, degree)
    logger.warning("the %s computes nothing: it sleeps as a profile predicts, and answers have no meaning", part.value)
    return Costs(profile)


def _prefixes(request: EngineRequest) -> list[bytes]:
    return BlockHashes(_BLOCK_TOKENS, request.token_ids, _items(request), salt=request.tenant_salt).hashes


def _items(request: EngineRequest) -> list[KeyedItem]:
    return [KeyedItem(span.key, tuple(range(span.start, span.start + span.tokens))) for span in request.embeddings]


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
