"""A router that plays one script per request, in this process or behind gRPC."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.embedding import DType
from triptych.domain.generation import ChatEvent, ChatFinished, ChoiceFinished, FinishReason, TokenChunk, Usage
from triptych.domain.instance import ModelInfo
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.timeline import Outcome, Readiness, Timeline
from triptych.errors import NotFound
from triptych.rpc.server import RpcServer
from triptych.services.router.servicer import SERVICE_NAME, RouterServicer
from triptych.testing.loras import NoLoras

MODEL = ModelInfo("demo", "r1", DType.F32, 64, 512)
USAGE = Usage(prompt_tokens=19, completion_tokens=3, image_tokens=16)
END = (ChoiceFinished(FinishReason.STOP), ChatFinished(USAGE))
HELLO: tuple[ChatEvent, ...] = (TokenChunk((1,), "Hel"), TokenChunk((2, 3), "lo"), *END)

Step = ChatEvent | Exception | asyncio.Event


class ScriptedRouter(NoLoras):
    """Request i plays script i, later ones the last: events to yield, errors to raise, asyncio events to wait for."""

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self.scripts = scripts or (HELLO,)
        self.requests: list[ChatRequest] = []
        self.resolves: list[ResolveRequest] = []
        self.resolved: tuple[ResolvedItem, ...] | Exception = ()
        self.model_lookups = 0
        self.models_served: tuple[ModelInfo, ...] = (MODEL,)
        self.closed = asyncio.Event()

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        self.requests.append(request)
        script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
        try:
            for step in script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield (step,)
        finally:
            self.closed.set()

    async def resolve(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        self.resolves.append(request)
        try:
            if isinstance(self.resolved, Exception):
                raise self.resolved
            yield self.resolved
            await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def models(self) -> tuple[ModelInfo, ...]:
        self.model_lookups += 1
        return self.models_served

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        del return_token_strs
        return Tokenized(tuple(range(len(request.messages))))

    async def timeline(self, request_id: str) -> Timeline:
        if request_id not in (request.request_id for request in self.requests):
            raise NotFound("the request is not known, or not any more", param="request_id")
        return Timeline(request_id, "demo", Outcome.DONE, text_instance="text-1")

    async def readiness(self) -> Readiness:
        return Readiness(ready=True, instances=("text-1: ready",))


@asynccontextmanager
async def behind_grpc(router: ScriptedRouter) -> AsyncIterator[str]:
    """Serves the router; its ``host:port``."""
    register = RouterServicer(router).register
    async with RpcServer(host="127.0.0.1", port=0, service_names=(SERVICE_NAME,), register=register) as server:
        yield f"127.0.0.1:{server.port}"
