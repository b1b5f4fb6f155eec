"""Fake engines whose answers can be checked.

An embedding is a digest of the item's bytes, stretched to an embedding's size. An answer is a digest of the prompt and
of every embedding at its position, with one token per item first. So an item that is lost, swapped, truncated, mixed up
or misplaced changes the answer; ``answer_tokens`` computes the right one.

Both engines spend virtual time (``testing.offload.spend``), and detect calls that would overlap in real threads.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b, shake_128
from itertools import islice

from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.domain.generation import FinishReason
from triptych.domain.instance import ModelInfo
from triptych.domain.media import MediaInfo, Shard
from triptych.errors import ContextTooLong, InvalidMedia, InvalidRequest
from triptych.policy.fairness import may_start
from triptych.policy.queueing import Turn
from triptych.ports import EngineOutput, EngineRequest, ScoredToken, Scores, StopSignal
from triptych.testing.offload import OneAtATime, spend

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
class Spliced:
    """An embedding at its position in the prompt, as the text engine received it."""

    start: int
    tokens: int
    embedding: bytes


def answer_tokens(
    token_ids: Sequence[int], items: Sequence[Spliced], *, vocabulary: range, choice: int = 0
) -> tuple[int, ...]:
    """The right answer: one token per item, then 4 to 11 that depend on all inputs and the choice.

    All are in ``vocabulary``.
    """
    whole = blake2b(array("q", token_ids).tobytes(), digest_size=32, salt=choice.to_bytes(2, "little"))
    answer: list[int] = []
    for item in sorted(items, key=lambda item: item.start):
        one = blake2b(b"%d:%d:" % (item.start, item.tokens) + item.embedding, digest_size=8).digest()
        whole.update(one)
        answer.append(_token(one, vocabulary))
    digest = whole.digest()
    answer += [_token(digest[index : index + 3], vocabulary) for index in range(4 + digest[31] % 8)]
    return tuple(answer)


def _token(digest: bytes, vocabulary: range) -> int:
    return vocabulary[int.from_bytes(digest, "little") % len(vocabulary)]


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

    def __post_init__(self) -> None:
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


@dataclass
class _Sequence:
    """One choice of a request."""

    request: EngineRequest
    choice: int
    answer: tuple[int, ...]
    unfilled_tokens: int
    """Tokens still to prefill; the first choice prefills for all."""
    sent: int = 0

    @property
    def limit(self) -> int:
        assert self.request.sampling.max_tokens is not None  # noqa: S101  # guaranteed by the port
        return self.request.sampling.max_tokens


@dataclass
class FakeTextEngine:
    """``ports.StagedTextEngine`` with continuous batching: a step prefills new requests and decodes one token of the
    others.

    A request's choices run together. One that goes on must have begun rightly. Supported sampling parameters are ``n``,
    ``max_tokens`` and ``logprobs``: the sampled token is certain and the alternatives are impossible.
    """

    vocabulary: range
    model: ModelInfo = FAKE_MODEL
    kv_tokens: int = 1 << 20
    max_running: int = 16
    step_s: float = 0.005
    prefill_token_s: float = 0.00005
    failures: deque[Exception] = field(default_factory=deque)
    """Errors for the next calls of ``step``, each for its oldest sequence."""
    placeholder_ids: frozenset[int] = frozenset({FAKE_PLACEHOLDER_ID})
    finds_prefixes: bool = True
    """It says so, for what routers do then; it computes them again."""

    def __post_init__(self) -> None:
        self._alone = OneAtATime("text engine")
        self._waiting: dict[str, list[_Sequence]] = {}
        self._running: dict[str, list[_Sequence]] = {}

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
        sequences: list[_Sequence] = []
        for choice, begun in request.begun.items():
            answer = answer_tokens(request.token_ids, items, vocabulary=self.vocabulary, choice=choice)
            if begun != answer[: len(begun)]:
                raise InvalidRequest(f"the answer of choice {choice} does not begin with {begun}")
            unfilled_tokens = 0 if sequences else len(request.token_ids) + len(begun)
            sequences.append(_Sequence(request, choice, answer, unfilled_tokens, len(begun)))
        self._waiting[request.request_id] = sequences

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        self._alone.enter()
        for sequences in (self._waiting, self._running):
            left = [one for one in sequences.pop(request_id, []) if choice is not None and one.choice != choice]
            if left:
                sequences[request_id] = left

    def reorder(self, request_id: str, turn: Turn) -> None:
        for one in self._waiting.get(request_id, []):
            one.request = replace(one.request, turn=turn)

    @property
    def prefill_ready(self) -> bool:
        return bool(self._waiting) and self._may_start(self._first_waiting(), 0)

    def step(self) -> list[EngineOutput]:
        started_beyond = 0
        while self._waiting and self._may_start(request_id := self._first_waiting(), started_beyond):
            self._running[request_id] = self._waiting.pop(request_id)
            started_beyond += self._running[request_id][0].request.turn.beyond_share
        return self.decode_step()

    def _first_waiting(self) -> str:
        return min(self._waiting, key=lambda one: self._waiting[one][0].request.turn)

    def _may_start(self, request_id: str, started_beyond: int) -> bool:
        """``max_running`` counts requests."""
        turn, running = self._waiting[request_id][0].request.turn, len(self._running)
        return may_start(turn, wanted=1, running=running, places=self.max_running, begun=started_beyond)

    def decode_step(self) -> list[EngineOutput]:
        """Running sequences were prefilled in the step that admitted them."""
        self._alone.enter()
        if not self._running:
            return []
        running = [one for sequences in self._running.values() for one in sequences]
        spend(self.step_s + self.prefill_token_s * sum(one.unfilled_tokens for one in running))
        outputs = []
        if self.failures:
            request_id = next(iter(self._running))
            del self._running[request_id]
            outputs.append(EngineOutput(request_id, (), error=self.failures.popleft()))
        outputs += [self._advance(one) for sequences in list(self._running.values()) for one in list(sequences)]
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(self._waiting)

    @property
    def pending_tokens(self) -> int:
        everyone = (*self._waiting.values(), *self._running.values())
        return sum(one.unfilled_tokens + one.limit - one.sent for sequences in everyone for one in sequences)

    def _advance(self, one: _Sequence) -> EngineOutput:
        one.unfilled_tokens = 0
        token = one.answer[one.sent]
        one.sent += 1
        reason = None
        if one.sent == len(one.answer):
            reason = FinishReason.STOP
        elif one.sent == one.limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.cancel(one.request.request_id, one.choice)
        alternatives = one.request.sampling.logprobs
        scores: tuple[Scores, ...] = ()
        if alternatives is not None:
            certain = ScoredToken(token, 0.0)
            others = (ScoredToken(other, float("-inf")) for other in self.vocabulary if other != token)
            scores = (Scores(certain, (certain, *islice(others, alternatives - 1)) if alternatives else ()),)
        return EngineOutput(one.request.request_id, (token,), reason, choice=one.choice, scores=scores)
