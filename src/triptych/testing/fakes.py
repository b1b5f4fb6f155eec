"""Fake engines whose answers can be checked.

An embedding is a digest of the item's bytes, stretched to an embedding's size. An answer is a digest of the prompt and
of every embedding at its position, by way of keys and values (``testing.fake_kv``). So an item, or a segment of keys and values, that
is lost, swapped, truncated, mixed up or misplaced changes the answer; ``answer_tokens`` computes the right one.

Both engines spend virtual time (``virtual.offload.spend``), and detect calls that would overlap in real threads.
"""

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import shake_128
from itertools import islice
from typing import Self

from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.domain.engine import EngineOutput, EngineRequest, ScoredToken, Scores
from triptych.domain.generation import FinishReason
from triptych.domain.instance import ModelInfo
from triptych.domain.kv_segment import KvCopies, KvKind, KvSegment
from triptych.domain.media import MediaInfo, Shard
from triptych.domain.queue_position import QueuePosition
from triptych.errors import ContextTooLong, EngineFailure, InvalidMedia, InvalidRequest
from triptych.machine.text.prefix_hashes import KeyedItem, PrefixHashes, salt_of
from triptych.policy.fairness import may_start
from triptych.ports import StopSignal
from triptych.testing.fake_kv import (
    POSITION_NBYTES,
    Spliced,
    answer_length,
    answer_tokens,
    extend,
    fake_kv_kind,
    next_token,
    read,
    rows_of,
    write,
)
from triptych.testing.loras import FakeLoras
from triptych.virtual.offload import OneAtATime, spend

FAKE_MODEL = ModelInfo("fake", "0" * 64, DType.F32, hidden_size=8, context_length=4096)
FAKE_PLACEHOLDER_ID = 1
"""Placeholder token in the fake model's prompts."""
BROKEN_MEDIA = b"triptych-fake-broken"
"""Media that ends in these bytes passes inspection but cannot be decoded."""


def fake_tensors(tokens: int, hidden_size: int) -> tuple[TensorSpec, ...]:
    """The tensors of an item with ``tokens`` tokens."""
    return (TensorSpec("embeddings", DType.F32, (tokens, hidden_size)),)


def fake_embedding(media: bytes, tokens: int, hidden_size: int) -> bytes:
    """The item's embedding, a digest of its bytes: float32 in [0, 1), shape (tokens, hidden_size)."""
    stretched = shake_128(media).digest(tokens * hidden_size)
    return array("f", (byte / 256 for byte in stretched)).tobytes()


@dataclass(frozen=True, slots=True)
class FakePrepared:
    """``ports.PreparedItem``."""

    media: bytes
    tokens: int
    outputs: tuple[TensorSpec, ...]
    first: int
    """First row of this part in the whole item's embedding."""
    whole: int
    """Rows of the whole item's embedding."""

    @property
    def nbytes(self) -> int:
        return len(self.media)


@dataclass
class FakeEncoderEngine:
    """``ports.EncoderEngine``; ``tokens_of`` must count tokens as the router's family does."""

    tokens_of: Callable[[MediaInfo], int]
    model: ModelInfo = FAKE_MODEL
    version: str = "fake-1"
    processor_digest: bytes = bytes(32)
    prepare_s: float = 0.002
    batch_s: float = 0.005
    token_s: float = 0.0002
    failures: deque[Exception] = field(default_factory=deque)
    """Errors for the next calls of ``encode``."""
    encoded_items: int = 0
    weights = None

    def __post_init__(self) -> None:
        self.loras = FakeLoras()
        self._alone = OneAtATime("encoder engine")

    def decoded_nbytes(self, info: MediaInfo, shard: Shard | None = None) -> int:  # noqa: ARG002  # ignores shards
        return 4 * info.pixels

    def prepare(
        self,
        media: bytes,
        info: MediaInfo,
        shard: Shard | None = None,
        stop: StopSignal | None = None,  # noqa: ARG002  # cannot be interrupted
    ) -> FakePrepared:
        """All units of an item have the same size."""
        spend(self.prepare_s)
        if media.endswith(BROKEN_MEDIA):
            raise InvalidMedia(f"the {info.modality.value} cannot be decoded")
        whole = self.tokens_of(info)
        first, tokens = (
            (0, whole) if shard is None else (whole * shard.first // shard.of, whole * shard.count // shard.of)
        )
        media += bytes.fromhex(info.lora)  # so that its embedding depends on the adapter
        return FakePrepared(media, tokens, fake_tensors(tokens, self.model.hidden_size), first, whole)

    def encode(self, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
        self._alone.enter()
        spend(self.batch_s + self.token_s * sum(item.tokens for item in batch))
        if self.failures:
            raise self.failures.popleft()
        self.encoded_items += len(batch)
        return [(Tensor(item.outputs[0], self._embedding(item)),) for item in batch]

    def _embedding(self, item: FakePrepared) -> memoryview:
        whole = memoryview(fake_embedding(item.media, item.whole, self.model.hidden_size))
        row_nbytes = self.model.hidden_size * DType.F32.itemsize
        return whole[item.first * row_nbytes : (item.first + item.tokens) * row_nbytes]


@dataclass(eq=False)
class _Sequence:
    """One choice of a request."""

    request: EngineRequest
    choice: int
    length: int
    """Tokens of the right answer."""
    token_ids: list[int]
    """Prompt and answer."""
    rows: Mapping[int, bytes]
    arriving: int = 0
    """Positions that come from elsewhere."""
    paused: bool = False
    contents: bytearray = field(default_factory=bytearray)
    """Keys and values of the positions that are computed or have arrived."""

    @property
    def computed(self) -> int:
        return len(self.contents) // POSITION_NBYTES

    @property
    def sent(self) -> int:
        return len(self.token_ids) - len(self.request.token_ids)

    @property
    def is_arriving(self) -> bool:
        return self.computed < self.arriving

    @property
    def limit(self) -> int:
        assert self.request.sampling.max_tokens is not None  # noqa: S101  # guaranteed by the port
        return self.request.sampling.max_tokens

    @property
    def unfilled_tokens(self) -> int:
        """Tokens still to prefill."""
        left = len(self.token_ids) - self.computed
        return 0 if left == 1 and self.sent else max(0, left - max(0, self.arriving - self.computed))


class FakeKvAccess:
    """``ports.KvAccess`` to the fake text engine's sequences, by request."""

    def __init__(
        self, kind: KvKind, waiting: Mapping[str, list[_Sequence]], running: Mapping[str, list[_Sequence]]
    ) -> None:
        self.kind = kind
        self._waiting = waiting
        self._running = running

    @property
    def awaiting(self) -> frozenset[tuple[str, int]]:
        running = (sequence for sequences in self._running.values() for sequence in sequences)
        return frozenset(
            (sequence.request.request_id, sequence.choice)
            for sequence in running
            if sequence.is_arriving and not sequence.paused
        )

    def pause(self, request_id: str) -> None:
        for sequence in (*self._waiting.get(request_id, []), *self._running.get(request_id, [])):
            sequence.paused = True

    def computed(self, request_id: str, choice: int) -> int:
        sequence = self._running_choice(request_id, choice)
        return sequence.computed if sequence is not None else 0

    def prefix_hash(self, request_id: str, choice: int, end: int) -> bytes | None:
        sequences = self._running.get(request_id) or self._waiting.get(request_id, [])
        sequence = next((sequence for sequence in sequences if sequence.choice == choice), None)
        if sequence is None or not all(item.key for item in sequence.request.embeddings):
            return None
        items = [
            KeyedItem(embedding.key, tuple(range(embedding.start, embedding.start + embedding.tokens)))
            for embedding in sequence.request.embeddings
        ]
        salt = salt_of(sequence.request.tenant_salt, sequence.request.lora)
        return PrefixHashes(items, salt=salt).hash_before(end, sequence.token_ids)

    def pack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        sequence = self._running_choice(request_id, choice)
        if sequence is None or sequence.computed < segment.end:
            return False
        if self.kind.is_whole and sequence.computed > segment.end:
            raise EngineFailure("the state is later already")
        memory[:] = read(sequence.contents, segment.first, segment.end)
        return True

    def unpack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        sequence = self._running_choice(request_id, choice)
        if sequence is None or (request_id, choice) not in self.awaiting:
            return False
        if segment.first > sequence.computed or segment.end > len(sequence.token_ids):
            return False
        write(sequence.contents, bytes(memory), max(0, sequence.computed - segment.first))
        del sequence.contents[(len(sequence.token_ids) - 1) * POSITION_NBYTES :]
        return True

    def arrived(self, request_id: str) -> None:
        for sequence in (*self._waiting.get(request_id, []), *self._running.get(request_id, [])):
            sequence.arriving = 0

    def _running_choice(self, request_id: str, choice: int) -> _Sequence | None:
        return next((sequence for sequence in self._running.get(request_id, []) if sequence.choice == choice), None)


@dataclass
class FakeTextEngine:
    """``ports.TextEngine`` and ``ports.DeviceSharing`` with continuous batching: a step prefills new requests and decodes one token of
    the others.

    A request's choices run together. One that goes on must have begun rightly. Supported sampling parameters are ``n``,
    ``max_tokens``, ``ignore_eos`` and ``logprobs``: the sampled token is certain and the alternatives are impossible.
    """

    vocabulary: range
    model: ModelInfo = FAKE_MODEL
    kv_tokens: int = 1 << 20
    kv_block_tokens: int = 1
    max_running: int = 16
    step_s: float = 0.005
    sequence_s: float = 0.0
    """Of each sequence in a step."""
    prefill_token_s: float = 0.00005
    chunk_tokens: int = 1 << 20
    """Most tokens of a prompt in one step."""
    failures: deque[Exception] = field(default_factory=deque)
    """Errors for the next calls of ``step``, each for its oldest sequence."""
    placeholder_ids: frozenset[int] = frozenset({FAKE_PLACEHOLDER_ID})
    finds_prefixes: bool = True
    """Whether it says so, for what routers do then; it computes them again."""
    has_states: bool = False
    """Whether keys and values are copied as a whole only (``SegmentKind.is_whole``)."""
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    kv_copies: KvCopies = KvCopies()  # noqa: RUF009  # immutable
    weights = None

    def __post_init__(self) -> None:
        self.loras = FakeLoras()
        self._alone = OneAtATime("text engine")
        self._waiting: dict[str, list[_Sequence]] = {}
        self._running: dict[str, list[_Sequence]] = {}
        self.kv = FakeKvAccess(fake_kv_kind(self.model, has_states=self.has_states), self._waiting, self._running)

    @property
    def sharing(self) -> Self:
        return self

    @property
    def steps(self) -> Self:
        return self

    @property
    def max_sequences(self) -> int:
        return self.max_running

    @property
    def token_budget(self) -> int:
        return max(self.max_running, self.chunk_tokens)

    @property
    def most_sequences(self) -> int:
        return self.kv_tokens

    @property
    def most_tokens(self) -> int:
        return 1 << 20

    def limit_steps(self, max_sequences: int, token_budget: int) -> None:
        self.max_running, self.chunk_tokens = max_sequences, token_budget

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return tuple(tensors) == fake_tensors(tokens, self.model.hidden_size)

    def add(self, request: EngineRequest) -> None:
        self._alone.enter()
        if request.request_id in self._waiting or request.request_id in self._running:
            raise InvalidRequest(f"request {request.request_id!r} is running already")
        if len(request.token_ids) > self.model.context_length:
            raise ContextTooLong(f"prompt has {len(request.token_ids)} tokens of {self.model.context_length}")
        items = [
            Spliced(item.start, item.tokens, bytes(item.tensors["embeddings"].data)) for item in request.embeddings
        ]
        if request.lora and request.lora not in self.loras.digests:
            raise InvalidRequest("the LoRA adapter of the request is not loaded")
        rows, sequences, has_leader = rows_of(items, request.lora), list[_Sequence](), False
        for choice, begun in request.begun.items():
            if begun:
                length = len(begun) if request.sampling.ignore_eos else None
                answer = answer_tokens(
                    request.token_ids,
                    items,
                    vocabulary=self.vocabulary,
                    choice=choice,
                    length=length,
                    lora=request.lora,
                )
                if begun != answer[: len(begun)]:
                    raise InvalidRequest(f"the answer of choice {choice} does not begin with {begun}")
            token_ids = [*request.token_ids, *begun]
            arriving = 0 if has_leader and not begun else min(request.arriving, len(token_ids) - 1)
            length = self.model.context_length  # beyond its limit
            if not request.sampling.ignore_eos:
                length = answer_length(request.token_ids, items, choice)
            sequences.append(_Sequence(request, choice, length, token_ids, rows, arriving))
            has_leader |= not begun
        self._waiting[request.request_id] = sequences

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        self._alone.enter()
        for sequences in (self._waiting, self._running):
            left = [
                sequence
                for sequence in sequences.pop(request_id, [])
                if choice is not None and sequence.choice != choice
            ]
            if left:
                sequences[request_id] = left

    def reorder(self, request_id: str, queue_position: QueuePosition) -> None:
        for sequence in self._waiting.get(request_id, []):
            sequence.request = replace(sequence.request, queue_position=queue_position)

    def preempt(self, request_id: str) -> None:
        """As if memory had run out: it waits, and what it had is lost."""
        for sequence in (sequences := self._running.pop(request_id)):
            sequence.arriving = 0
            sequence.contents.clear()
        self._waiting[request_id] = sequences
        self.preemptions += 1

    @property
    def prefill_queue_position(self) -> QueuePosition | None:
        first = self._first_waiting()
        return (
            None if first is None or not self._may_start(first, 0) else self._waiting[first][0].request.queue_position
        )

    @property
    def can_step(self) -> bool:
        return self.prefill_queue_position is not None or any(
            self._active(sequences) for sequences in self._running.values()
        )

    def step(self) -> list[EngineOutput]:
        started_beyond = 0
        while (request_id := self._first_waiting()) is not None and self._may_start(request_id, started_beyond):
            self._running[request_id] = self._waiting.pop(request_id)
            started_beyond += self._running[request_id][0].request.queue_position.beyond_share
        return self.decode_step()

    def _first_waiting(self) -> str | None:
        waiting = [name for name, sequences in self._waiting.items() if not sequences[0].paused]
        return min(waiting, key=lambda request_id: self._waiting[request_id][0].request.queue_position, default=None)

    def _may_start(self, request_id: str, started_beyond: int) -> bool:
        """``max_running`` counts requests."""
        queue_position, running = self._waiting[request_id][0].request.queue_position, len(self._running)
        return may_start(queue_position, wanted=1, running=running, places=self.max_running, begun=started_beyond)

    def _active(self, sequences: Sequence[_Sequence]) -> list[_Sequence]:
        """Sequences that compute something: not the paused and arriving ones, nor those that wait for another's prompt."""
        leader = self._leader(sequences)
        active = [sequence for sequence in sequences if not (sequence.paused or sequence.is_arriving)]
        return [sequence for sequence in active if sequence is leader or sequence.sent]

    def _leader(self, sequences: Sequence[_Sequence]) -> _Sequence | None:
        """The new choice that computes the prompt for the others."""
        return next((sequence for sequence in sequences if not sequence.sent), None)

    def decode_step(self) -> list[EngineOutput]:
        """Running sequences were prefilled in the step that admitted them, unless they arrived or were chunked."""
        self._alone.enter()
        active = [sequence for sequences in self._running.values() for sequence in self._active(sequences)]
        if not active:
            return []
        counts = [min(sequence.unfilled_tokens, self.chunk_tokens) for sequence in active]
        spend(self.step_s + self.sequence_s * len(active) + self.prefill_token_s * sum(counts))
        outputs = []
        if self.failures:
            request_id = active[0].request.request_id
            del self._running[request_id]
            outputs.append(EngineOutput(request_id, (), error=self.failures.popleft()))
        for sequence, count in zip(active, counts, strict=True):
            for other in self._fill(sequence, max(1, count)):
                outputs.append(self._advance(other))  # noqa: PERF401  # it changes what is running
        return outputs

    def _fill(self, sequence: _Sequence, count: int) -> list[_Sequence]:
        """Compute ``count`` positions. Returns what gets a token then: a prompt's choices all together."""
        sequences = self._running.get(sequence.request.request_id, [])
        if sequence not in sequences:
            return []
        extend(sequence.contents, sequence.token_ids[sequence.computed : sequence.computed + count], sequence.rows)
        if sequence.computed < len(sequence.token_ids):
            return []
        if sequence.sent:
            return [sequence]
        together = [other for other in sequences if not other.sent]
        for other in together[1:]:
            other.contents = sequence.contents.copy()
        return together

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(self._waiting)

    @property
    def pending_tokens(self) -> int:
        everyone = [sequences for where in (self._waiting, self._running) for sequences in where.values()]
        return sum(self._pending_tokens(sequences) for sequences in everyone)

    def _pending_tokens(self, sequences: Sequence[_Sequence]) -> int:
        """The first one counts the prompt for all."""
        going = [sequence for sequence in sequences if not sequence.paused]
        return sum(sequence.unfilled_tokens for sequence in going[:1]) + sum(
            sequence.limit - sequence.sent for sequence in going
        )

    @property
    def kv_free_tokens(self) -> int:
        return self.kv_tokens - sum(sequence.computed for sequences in self._running.values() for sequence in sequences)

    def _advance(self, sequence: _Sequence) -> EngineOutput:
        token = next_token(sequence.contents, self.vocabulary, sequence.choice)
        sequence.token_ids.append(token)
        sequence.paused |= sequence.request.pauses
        reason = None
        if sequence.sent == sequence.length:
            reason = FinishReason.STOP
        elif sequence.sent == sequence.limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.cancel(sequence.request.request_id, sequence.choice)
        alternatives = sequence.request.sampling.logprobs
        scores: tuple[Scores, ...] = ()
        if alternatives is not None:
            certain = ScoredToken(token, 0.0)
            others = (ScoredToken(other, float("-inf")) for other in self.vocabulary if other != token)
            scores = (Scores(certain, (certain, *islice(others, alternatives - 1)) if alternatives else ()),)
        return EngineOutput(sequence.request.request_id, (token,), reason, choice=sequence.choice, scores=scores)
