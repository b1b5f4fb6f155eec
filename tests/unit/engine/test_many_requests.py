"""Two thousand random requests, with cancellations, errors and preemptions: nothing is left over, and nothing grows."""

import gc
import random
from pathlib import Path

import psutil
import pytest
import torch

from tests.unit.engine.tiny import text_engine
from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.domain.sampling import SamplingParams
from triptych.engine.start import KvOptions
from triptych.engine.text import TransformersTextEngine
from triptych.errors import EngineFailure, InvalidRequest, TriptychError
from triptych.ports import EmbeddingInput, EngineRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SLOT_NBYTES = 2 * 3 * 2 * 16 * 4
BAD_TOKEN = 123


class Lucky:
    """A grammar that allows everything, or fails after a while."""

    def __init__(self, left: int) -> None:
        self._left = left

    def fork(self) -> "Lucky":
        return Lucky(self._left)

    def allowed(self) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest("too complex")
        return b"\xff" * 16

    def accept(self, token_id: int) -> None:
        del token_id


def random_request(chance: random.Random, name: str) -> EngineRequest:
    beginning = [4 + chance.randrange(3)] * chance.randrange(24)
    prompt = [*beginning, *(chance.randrange(4, 120) for _ in range(chance.randrange(1, 24)))]
    embeddings: tuple[EmbeddingInput, ...] = ()
    if chance.random() < 0.3:
        tokens = chance.randrange(1, 9)
        at = chance.randrange(len(prompt))
        prompt[at:at] = [2] * tokens
        spec = TensorSpec("embeds", DType.F32, (tokens, 64))
        kind = chance.randrange(3)
        data = memoryview(bytes([0, 0, 128, 60 + kind]) * (spec.nbytes // 4))
        embeddings = (EmbeddingInput(at, tokens, {"embeds": Tensor(spec, data)}, b"item %d %d" % (kind, tokens)),)
    if chance.random() < 0.05:
        prompt[0] = BAD_TOKEN
        embeddings = ()
        prompt = [token for token in prompt if token != 2]
    sampling = SamplingParams(
        temperature=chance.choice([0.0, 1.2]),
        max_tokens=chance.randrange(1, 10),
        ignore_eos=chance.random() < 0.5,
        seed=chance.randrange(100),
        n=chance.choice([1, 1, 1, 2, 3]),
        logprobs=chance.choice([None, None, 2]),
    )
    grammar = Lucky(chance.randrange(30)) if chance.random() < 0.1 else None
    return EngineRequest(name, tuple(prompt), embeddings, sampling, grammar)


def break_bad_token(engine: TransformersTextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    embed_tokens = engine._half.decoder.get_input_embeddings()
    whole = embed_tokens.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        if (ids == BAD_TOKEN).any():
            raise RuntimeError("kernel failed")
        embedded: torch.Tensor = whole(ids)
        return embedded

    monkeypatch.setattr(embed_tokens, "forward", forward)


@pytest.mark.parametrize(("contiguous", "requests"), [(True, 2000), (False, 300)])
def test_nothing_is_left_over_and_nothing_grows(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, contiguous: bool, requests: int
) -> None:
    caplog.set_level("CRITICAL")
    chance = random.Random(int(contiguous))
    engine = text_engine(
        model_dir,
        kv_cache_bytes=192 * SLOT_NBYTES,
        max_sequences=8,
        token_budget=48,
        kv=KvOptions(4, contiguous=contiguous),
    )
    break_bad_token(engine, monkeypatch)
    process = psutil.Process()
    outcomes: dict[str, str] = {}
    left: dict[str, int] = {}
    early_nbytes = 0

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
        request = random_request(chance, name)
        left[name] = request.sampling.n
        engine.add(request)
        if chance.random() < 0.1:
            victim = str(chance.randrange(max(0, number - 6), number + 1))
            outcomes.setdefault(victim, "cancelled")
            engine.cancel(victim)
        while engine.pending_tokens > 500:
            step()
        if number == requests // 10:
            gc.collect()
            early_nbytes = process.memory_info().rss
    while engine.has_work:
        step()
    gc.collect()
    late_nbytes = process.memory_info().rss
    engine._batch.validate()
    assert set(outcomes) == set(left)
    assert {"done", "cancelled", EngineFailure.__name__, InvalidRequest.__name__} == set(outcomes.values())
    assert not contiguous or engine.preemptions > 5
    assert engine.prefix_hits_tokens > requests
    assert engine.kv_free_slots == engine.kv_slots
    assert (engine.embedding_nbytes, engine.pending_tokens, engine._sequences) == (0, 0, {})
    assert requests < 2000 or late_nbytes < 1.05 * early_nbytes
