"""Five thousand malformed bodies of each of four seeds: no 5xx, no hang, no leak, and the next request is served."""

import asyncio
import gc
import json
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

import pytest

from tests.integration.gateway.bodies import Bodies
from tests.integration.gateway.door import Door, make_gateway
from tests.unit.services.gateway.fakes import MODEL
from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.generation import ChatEvent, ChatFinished, ChoiceFinished, FinishReason, TokenChunk, Usage
from triptych.domain.instance import ModelInfo
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.timeline import Readiness, Timeline
from triptych.errors import InvalidRequest, NotFound
from triptych.media.fetch import FetchLimits
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.runtime.clock import monotonic
from triptych.runtime.offload import ThreadOffload
from triptych.services.gateway.response_store import StoreLimits
from triptych.testing.loras import NoLoras

CASES = 5_000
SEEDS = [7, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (8, 9, 10))]
AT_ONCE = 8
GROWTH_BYTES = 2 << 20
GOOD = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}).encode()


class SniffingRouter(NoLoras):
    """``ports.Router`` that inspects images as the real one does, and answers every choice with one word."""

    def __init__(self) -> None:
        self.running = 0

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        self._check(request)
        self.running += 1
        try:
            for choice in range(request.sampling.n):
                yield TokenChunk((1,), "word", choice), ChoiceFinished(FinishReason.STOP, choice)
            yield (ChatFinished(Usage(1, request.sampling.n)),)
        finally:
            self.running -= 1

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        self._check(request)
        return Tokenized((1, 2), ("a", "b") if return_token_strs else ())

    def _check(self, request: ChatRequest) -> None:
        for part in request.media:
            inspect_media(part.data, MediaLimits())
        if request.tools:
            raise InvalidRequest("does not support tools", param="tools")

    async def resolve(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        del request
        yield ()

    async def models(self) -> tuple[ModelInfo, ...]:
        return (MODEL,)

    async def timeline(self, request_id: str) -> Timeline:
        raise NotFound(request_id)

    async def readiness(self) -> Readiness:
        return Readiness(ready=True)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", SEEDS)
async def test_no_body_breaks_the_gateway(seed: int) -> None:
    asyncio.get_running_loop().set_debug(False)  # debug mode would take most of the time
    offload = ThreadOffload(1, name="fuzz")
    router = SniffingRouter()
    settings = {
        "fetch_limits": FetchLimits(fetch_timeout_s=1.0),
        "response_store": StoreLimits(max_stored_responses=8),
    }
    gateway = make_gateway(router, offload, monotonic, **settings)
    door = Door(gateway, monotonic)
    bodies = Bodies(seed=seed)
    statuses: Counter[int] = Counter()

    async def in_turn(count: int) -> None:
        for _ in range(count):
            path, body = bodies.next()
            async with asyncio.timeout(60):
                got = await door.post(path, body)
            statuses[got.status] += 1
            assert got.status in (200, 400, 404), (got.status, path, body)
            if got.status != 200:
                assert got.json["error"]["message"], (path, body)

    async def all_at_once(cases: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(in_turn(cases // AT_ONCE))

    try:
        await all_at_once(CASES // 10)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        await all_at_once(CASES - CASES // 10)
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert growth < GROWTH_BYTES, f"{growth} bytes more after {CASES} bodies"
        assert (gateway.admission.requests, gateway.admission.nbytes, router.running) == (0, 0, 0)
        assert min(statuses[200], statuses[400]) > CASES // 20, statuses
        good = await door.post("/v1/chat/completions", GOOD)
        assert (good.status, good.json["choices"][0]["message"]["content"]) == (200, "word")
    finally:
        offload.close()
