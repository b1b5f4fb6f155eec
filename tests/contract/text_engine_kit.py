"""The text engines with the demo model, requests to them, and what they answer."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from tests.e2e.reference import DIGITS, Question
from triptych.demo import MODEL_DIR, MODEL_ID
from triptych.domain.chat import MediaPart, Message, Part, TextPart
from triptych.domain.embedding import Tensor
from triptych.domain.engine import EmbeddingInput, EngineOutput, EngineRequest, Scores
from triptych.domain.generation import FinishReason
from triptych.domain.media import Modality, digest_of
from triptych.domain.queue_position import FIRST_COME, QueuePosition
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.engine.checkpoint import Checkpoint, open_checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.ports import TextEngine
from triptych.tokens.grammar import Grammars
from triptych.tokens.prompt import PromptBuilder
from triptych.tokens.tokenizer import Tokenizer

MAX_EMBEDDING_BYTES = 1 << 19
NO_VLLM = "NOT TESTED: vLLM is not installed here; make test-vllm"
VLLM_ARGS = "--kv-cache-memory-bytes 67108864 --enforce-eager --block-size 32"


@cache
def checkpoint() -> Checkpoint:
    return open_checkpoint(MODEL_DIR)


def own(kv: KvOptions | None = None, **options: Any) -> TransformersTextEngine:
    """Without compiled kernels where vLLM is: it does not start in a process that has loaded Numba's compiler before."""
    eager = find_spec("vllm") is not None
    return TransformersTextEngine(
        checkpoint(),
        EngineOptions(**({"kv_cache_bytes": 16 << 20, "enforce_eager": eager} | options)),
        model_id=MODEL_ID,
        max_embedding_bytes=MAX_EMBEDDING_BYTES,
        compute=ComputeOptions(packed_weight_bytes=0),
        kv=kv,
    )


def vllm(arguments: str = "", **options: Any) -> TextEngine:
    if find_spec("vllm") is None:
        pytest.skip(NO_VLLM)
    from triptych.integrations.vllm.engine import VllmTextEngine

    return VllmTextEngine(
        checkpoint(),
        f"{VLLM_ARGS} {arguments}",
        model_id=MODEL_ID,
        max_embedding_bytes=MAX_EMBEDDING_BYTES,
        compute=ComputeOptions(),
        **options,
    )


ENGINES: Mapping[str, Callable[[], TextEngine]] = {"triptych": own, "vllm": vllm}


@contextmanager
def opened(name: str) -> Iterator[TextEngine]:
    """An engine of ``ENGINES``, until it is closed."""
    engine = ENGINES[name]()
    yield engine
    close(engine)


def close(engine: TextEngine) -> None:
    if end := getattr(engine, "close", None):
        end()


@cache
def _encoder() -> TransformersEncoderEngine:
    return TransformersEncoderEngine(checkpoint(), model_id=MODEL_ID, compute=ComputeOptions())


@cache
def _prompts() -> PromptBuilder:
    return PromptBuilder.load(checkpoint().files)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint().files)


@cache
def _grammars() -> Grammars:
    return Grammars(tokenizer())


@cache
def _encoded(name: str) -> tuple[int, dict[str, Tensor], bytes]:
    """An image's positions, tensors and identity."""
    media = (DIGITS / f"{name}.png").read_bytes()
    prepared = _encoder().prepare(media, inspect_media(media, MediaLimits()))
    (tensors,) = _encoder().encode([prepared])
    return prepared.tokens, {tensor.spec.name: tensor for tensor in tensors}, digest_of(media)


@cache
def no_white_space() -> tuple[tuple[int, float], ...]:
    """Bias against it: some releases of llguidance let it repeat without end between JSON's tokens."""
    backend = tokenizer().backend
    return tuple((token, -100.0) for token in range(backend.get_vocab_size()) if backend.decode([token]).isspace())


def greedy(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "seed": 0, "max_tokens": max_tokens} | options))


def drawn(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 2.0, "seed": 7, "max_tokens": max_tokens, "ignore_eos": True} | options))


def request(
    name: str,
    question: Question,
    sampling: SamplingParams | None = None,
    *,
    schema: object = None,
    tenant_salt: bytes = b"",
    queue_position: QueuePosition = FIRST_COME,
) -> EngineRequest:
    """As router, encoder and text service make it."""
    medias = [(DIGITS / f"{image}.png").read_bytes() for image in question.images]
    parts: list[Part] = [MediaPart(Modality.IMAGE, media) for media in medias]
    message = Message("user", (*parts, TextPart(question.text)))
    prompt = _prompts().build([message], [inspect_media(media, MediaLimits()) for media in medias])
    embeddings = []
    for image, run in zip(question.images, prompt.runs, strict=True):
        tokens, tensors, key = _encoded(image)
        embeddings.append(EmbeddingInput(run.start, tokens, tensors, key))
    grammar = None
    if schema is not None:
        grammar = _grammars().start(ResponseFormat(Grammar.JSON_SCHEMA, json.dumps(schema)))
    return EngineRequest(
        name,
        tuple(prompt.token_ids),
        tuple(embeddings),
        sampling or greedy(question.max_tokens),
        grammar,
        tenant_salt,
        queue_position,
    )


@dataclass
class Answered:
    """A choice's outputs."""

    token_ids: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    reason: FinishReason | None = None
    error: Exception | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return tokenizer().backend.decode(self.token_ids)


Answers = dict[tuple[str, int], Answered]


def collect(answers: Answers, outputs: Iterable[EngineOutput]) -> None:
    for output in outputs:
        answered = answers.setdefault((output.request_id, output.choice), Answered())
        assert answered.reason is None, "nothing follows the end of a choice"
        answered.token_ids += output.token_ids
        answered.scores += output.scores
        answered.reason, answered.error = output.finish_reason, output.error
        answered.cached_tokens = output.cached_tokens


def finish(engine: TextEngine) -> Answers:
    """Steps until no work is left."""
    answers: Answers = {}
    while engine.has_work:
        collect(answers, engine.step())
    return answers


def ask(engine: TextEngine, *requests: EngineRequest) -> Answers:
    for request in requests:
        engine.add(request)
    return finish(engine)


def ask_one(engine: TextEngine, asked: EngineRequest) -> Answered:
    return ask(engine, asked)[asked.request_id, 0]


def assert_idle(engine: TextEngine) -> None:
    """Nothing is held for a request that has ended."""
    assert not engine.has_work
    assert engine.pending_tokens == 0
    assert not engine.waiting
    assert engine.kv_free_tokens == engine.kv_tokens


def shuffled(names: Sequence[str], seed: int) -> list[str]:
    return random.Random(seed).sample(list(names), len(names))
