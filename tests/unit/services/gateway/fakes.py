"""A scripted router that records its requests."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.embedding import DType
from triptych.domain.generation import ChatEvent, ChatFinished, ChoiceFinished, FinishReason, TokenChunk, Usage
from triptych.domain.instance import ModelInfo
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.timeline import ItemTimeline, Outcome, Readiness, Timeline
from triptych.errors import NotFound
from triptych.testing.loras import NoLoras

MODEL = ModelInfo("demo", "r1", DType.F32, 64, 512)
FINISH = (
    ChoiceFinished(FinishReason.STOP),
    ChatFinished(Usage(prompt_tokens=19, completion_tokens=3, image_tokens=16)),
)
HELLO: tuple[ChatEvent, ...] = (TokenChunk((1,), "Hel"), TokenChunk((2,), ""), TokenChunk((3,), "lo"), *FINISH)

Step = ChatEvent | tuple[ChatEvent, ...] | Exception | asyncio.Event


class FakeRouter(NoLoras):
    """``ports.Router``: yields events (those of a tuple together), raises exceptions, and waits for asyncio events, as
    its script says.
    """

    def __init__(self, script: Sequence[Step] = HELLO) -> None:
        self.script: Sequence[Step] = script
        self.requests: list[ChatRequest] = []
        self._arrivals: asyncio.Queue[ChatRequest] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.told: dict[str, Any] = {"text_attempts": 1, "prompt_tokens": 19}
        """Of each request's timeline."""
        self.readiness_answer: Readiness | Exception = Readiness(ready=True, instances=("encoder-1", "text-1"))
        self.models_answer: Callable[[], tuple[ModelInfo, ...]] = lambda: (MODEL,)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        self.requests.append(request)
        self._arrivals.put_nowait(request)
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step if isinstance(step, tuple) else (step,)
        finally:
            self.closed.set()

    async def next_request(self) -> ChatRequest:
        """Wait until one more request has arrived."""
        return await self._arrivals.get()

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        self.requests.append(request)
        return Tokenized((5, 6, 7), ("a", "<image>", "b") if return_token_strs else ())

    async def resolve(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        del request
        yield ()

    async def models(self) -> tuple[ModelInfo, ...]:
        return self.models_answer()

    async def timeline(self, request_id: str) -> Timeline:
        if request_id not in (request.request_id for request in self.requests):
            raise NotFound(f"request {request_id!r} is not in the history")
        item = ItemTimeline(
            0, "image", 56, 56, 16, encoder="encoder-1", encode_attempts=1, pull_backend="memory", pull_bytes=4096
        )
        return Timeline(request_id, "demo", Outcome.DONE, (item,), text_instance="text-1", **self.told)

    async def readiness(self) -> Readiness:
        if isinstance(self.readiness_answer, Exception):
            raise self.readiness_answer
        return self.readiness_answer


class BusyRouter(FakeRouter):
    """Keeps the event loop from everything else for ``busy_s`` with each request, as parsing and answering many at once does."""

    def __init__(self, busy_s: float) -> None:
        super().__init__()
        self.busy_s = busy_s

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        time.sleep(self.busy_s)  # noqa: ASYNC251 - the loop is to be late
        async for events in super().chat(request):
            yield events

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        time.sleep(self.busy_s)  # noqa: ASYNC251
        return await super().tokenize(request, return_token_strs=return_token_strs)
