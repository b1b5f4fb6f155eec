"""Many random requests, with cancellations, errors and preemptions: no leaks and no growth."""

import gc
import logging
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch

from tests.unit.engine.tiny import text_engine
from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.domain.engine import EmbeddingInput, EngineRequest
from triptych.domain.sampling import SamplingParams
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.errors import EngineFailure, InvalidRequest, TriptychError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SLOT_NBYTES = 2 * 3 * 2 * 16 * 4
BAD_TOKEN = 123
EARLY = 200
"""Requests after which memory must not grow any more."""


class FailingGrammar:
    """A grammar that allows everything, or fails after a while."""

    def __init__(self, left: int) -> None:
        self._left = left

    def fork(self) -> "FailingGrammar":
        return FailingGrammar(self._left)

    def allowed(self) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest("too complex")
        return b"\xff" * 16

    def accept(self, token_id: int) -> None:
        del token_id


def random_request(rng: random.Random, name: str) -> EngineRequest:
    beginning = [4 + rng.randrange(3)] * rng.randrange(24)
    prompt = [*beginning, *(rng.randrange(4, 120) for _ in range(rng.randrange(1, 24)))]
    embeddings: tuple[EmbeddingInput, ...] = ()
    if rng.random() < 0.3:
        tokens = rng.randrange(1, 9)
        at = rng.randrange(len(prompt))
        prompt[at:at] = [2] * tokens
        spec = TensorSpec("embeds", DType.F32, (tokens, 64))
        kind = rng.randrange(3)
        data = memoryview(bytes([0, 0, 128, 60 + kind]) * (spec.nbytes // 4))
        embeddings = (EmbeddingInput(at, tokens, {"embeds": Tensor(spec, data)}, b"item %d %d" % (kind, tokens)),)
    if rng.random() < 0.05:
        prompt[0] = BAD_TOKEN
        embeddings = ()
        prompt = [token for token in prompt if token != 2]
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.2]),
        max_tokens=rng.randrange(1, 25),
        ignore_eos=rng.random() < 0.5,
        seed=rng.randrange(100),
        n=rng.choice([1, 1, 1, 2, 3]),
        logprobs=rng.choice([None, None, 2]),
    )
    grammar = FailingGrammar(rng.randrange(30)) if rng.random() < 0.1 else None
    return EngineRequest(name, tuple(prompt), embeddings, sampling, grammar)


def break_bad_token(engine: TransformersTextEngine) -> None:
    embed_tokens = engine._adapter.decoder.get_input_embeddings()
    whole = embed_tokens.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        if (ids == BAD_TOKEN).any():
            raise RuntimeError("kernel failed")
        embedded: torch.Tensor = whole(ids)
        return embedded

    embed_tokens.forward = forward


@dataclass(frozen=True, slots=True)
class Served:
    """The results of all requests, and the engine's memory after ``EARLY`` of them and after all."""

    outcomes: dict[str, int]
    preemptions: int
    prefix_hits_tokens: int
    free_slots: int
    slots: int
    held: tuple[int, ...]
    """Embeddings' bytes, tokens and sequences that are left."""
    early_nbytes: int
    """Of the process, resident, while nothing runs."""
    late_nbytes: int


def serve(model_dir: Path, contiguous: bool, requests: int) -> Served:
    """Runs in a separate process, so that its memory is the engine's."""
    logging.disable(logging.CRITICAL)
    rng = random.Random(int(contiguous))
    engine = text_engine(
        model_dir,
        kv_cache_bytes=248 * SLOT_NBYTES,
        max_sequences=16,
        token_budget=48,
        kv=KvOptions(4, contiguous=contiguous),
    )
    break_bad_token(engine)
    outcomes: dict[str, str] = {}
    left: dict[str, int] = {}
    resident: list[int] = []

    def step() -> None:
        for output in engine.step():
            if output.error is not None:
                assert isinstance(output.error, TriptychError)
                outcomes[output.request_id] = type(output.error).__name__
            elif output.finish_reason is not None:
                left[output.request_id] -= 1
                if not left[output.request_id]:
                    outcomes[output.request_id] = "done"

    for number in range(requests):
        name = str(number)
        request = random_request(rng, name)
        left[name] = request.sampling.n
        engine.add(request)
        if rng.random() < 0.1:
            victim = str(rng.randrange(max(0, number - 6), number + 1))
            outcomes.setdefault(victim, "cancelled")
            engine.cancel(victim)
        while engine.pending_tokens > 500:
            step()
        if number + 1 in (EARLY, requests):
            while engine.has_work:
                step()
            gc.collect()
            resident.append(psutil.Process().memory_info().rss)
            engine._batch.validate()
    assert set(outcomes) == set(left)
    return Served(
        dict(Counter(outcomes.values())),
        engine.preemptions,
        engine.prefix_hits_tokens,
        engine.kv_free_tokens,
        engine.kv_tokens,
        (engine.embedding_nbytes, engine.pending_tokens, engine.has_work),
        *resident,
    )


@pytest.mark.parametrize(
    ("contiguous", "requests"),
    [
        pytest.param(True, 2000, id="contiguous", marks=pytest.mark.extended),
        pytest.param(False, 2000, id="scattered", marks=pytest.mark.extended),
        pytest.param(False, 800, id="fewer"),
    ],
)
def test_many_requests_leak_nothing_and_memory_does_not_grow(model_dir: Path, contiguous: bool, requests: int) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        served = process.submit(serve, model_dir, contiguous, requests).result()
    assert set(served.outcomes) == {"done", "cancelled", EngineFailure.__name__, InvalidRequest.__name__}
    assert sum(served.outcomes.values()) == requests
    assert min(served.outcomes.values()) >= requests / 100
    assert served.preemptions >= requests / 100
    assert served.prefix_hits_tokens > requests
    assert served.free_slots == served.slots
    assert served.held == (0, 0, 0)
    assert served.late_nbytes <= 1.05 * served.early_nbytes
