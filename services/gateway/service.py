"""The gateway as an object: requests in, domain types to the router, answers out. It knows no HTTP."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace

from triptych.domain.chat import ChatRequest, Tokenized, ToolCall
from triptych.domain.generation import (
    ChatEvent,
    ChatFinished,
    ChoiceFinished,
    FinishReason,
    TokenChunk,
    ToolCallMade,
)
from triptych.domain.instance import ModelInfo
from triptych.domain.timeline import Readiness, Timeline
from triptych.errors import InstanceLost, ModelNotFound, RequestTimeout, RequestTooLarge, TriptychError
from triptych.ports import Offload, Router

from .admission import Admission, Hold
from .answers import CHAT_PREFIX, COMPLETION_PREFIX, WholeAnswer, WholeChoice
from .keys import Caller, KeyRing
from .media import RemoteMedia
from .openai_api import ParsedChat, tenant_salt
from .settings import GatewaySettings

logger = logging.getLogger(__name__)

Parse = Callable[[bytearray, int], ParsedChat]
"""(body, largest item in bytes) -> the request. Raises InvalidRequest or InvalidMedia."""


class OpenChat:
    """An answer whose first event has arrived: from here on nothing can be refused any more."""

    def __init__(self, request: ParsedChat, first: ChatEvent, rest: AsyncGenerator[ChatEvent]) -> None:
        self.request = request
        self._first = first
        self._rest = rest
        self.spent_tokens = 0
        """Those of the answer so far, and at its end those of the prompt too."""

    async def events(self) -> AsyncGenerator[ChatEvent]:
        """All events up to and including ChatFinished. Raises InstanceLost when the stream ends without it."""
        event = self._first
        while True:
            match event:
                case TokenChunk():
                    self.spent_tokens += len(event.token_ids)
                case ChatFinished(usage=usage):
                    self.spent_tokens = usage.total_tokens
            yield event
            if isinstance(event, ChatFinished):
                return
            event = await _next(self._rest)

    async def collect(self) -> WholeAnswer:
        """The whole answer."""
        chunks: list[list[TokenChunk]] = [[] for _ in range(self.request.sampling.n)]
        calls: list[list[ToolCall]] = [[] for _ in chunks]
        reasons = [FinishReason.STOP] * len(chunks)
        async with aclosing(self.events()) as events:
            async for event in events:
                match event:
                    case TokenChunk():
                        chunks[event.choice].append(event)
                    case ToolCallMade():
                        calls[event.choice].append(event.call)
                    case ChoiceFinished():
                        reasons[event.choice] = event.reason
                    case ChatFinished():
                        choices = map(_whole, chunks, calls, reasons)
                        return WholeAnswer(tuple(choices), event.usage)
        raise AssertionError("events() ends with ChatFinished or raises")


def _whole(chunks: list[TokenChunk], calls: list[ToolCall], reason: FinishReason) -> WholeChoice:
    logprobs = tuple(entry for chunk in chunks for entry in chunk.logprobs)
    return WholeChoice("".join(chunk.text for chunk in chunks), reason, logprobs, tuple(calls))


async def _next(events: AsyncGenerator[ChatEvent]) -> ChatEvent:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise InstanceLost("the answer broke off before its end") from None


class Gateway:
    """What the routes call. ``wall_s`` gives seconds since 1970, for the ``created`` fields of answers."""

    def __init__(
        self,
        router: Router,
        offload: Offload,
        settings: GatewaySettings,
        wall_s: Callable[[], float],
        *,
        keys: KeyRing,
        media: RemoteMedia,
    ) -> None:
        self._router = router
        self._offload = offload
        self._settings = settings
        self._wall_s = wall_s
        self._started_at = int(wall_s())
        self._media = media
        self.keys = keys
        self.admission = Admission(settings.max_concurrent_requests, settings.max_buffered_bytes)

    @property
    def settings(self) -> GatewaySettings:
        return self._settings

    def created(self) -> int:
        return int(self._wall_s())

    async def read_body(self, chunks: AsyncIterator[bytes], announced_bytes: int | None, hold: Hold) -> bytearray:
        """Collect a body within its bounds, in one copy.

        What was only announced takes no room from others: a client that promises much and sends nothing holds nothing.
        Raises RequestTooLarge, Overloaded when all bodies together are, RequestTimeout when it does not arrive.
        """
        limit, limit_s = self._settings.max_body_bytes, self._settings.body_timeout_s
        if announced_bytes is not None and announced_bytes > limit:
            raise RequestTooLarge(f"the body has {announced_bytes} bytes, the limit is {limit}")
        body = bytearray()
        try:
            async with asyncio.timeout(limit_s):
                async for chunk in chunks:
                    if len(body) + len(chunk) > limit:
                        raise RequestTooLarge(f"the body has more than {limit} bytes, which is the limit")
                    body += chunk
                    hold.grow_to(len(body))
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {limit_s:g} s") from None
        return body

    async def parse(self, how: Parse, body: bytearray, hold: Hold) -> ParsedChat:
        """A request with all of its media. Raises InvalidRequest, InvalidMedia, or Overloaded."""
        if len(body) <= self._settings.parse_inline_bytes:
            request = how(body, self._settings.max_item_bytes)
        else:
            request = await self._offload.run(how, body, self._settings.max_item_bytes)
        return await self._media.complete(request, hold.grow)

    @asynccontextmanager
    async def chat(
        self, request_id: str, request: ParsedChat, caller: Caller, timeout_s: float
    ) -> AsyncGenerator[OpenChat]:
        """Ask the router and wait for the first event; leaving the context cancels what still runs.

        Raises whatever error comes instead of a first event.
        """
        events = self._router.chat(self._to_router(request_id, request, caller, timeout_s))
        async with aclosing(events):
            with _naming_fields(request):
                first = await _next(events)
            chat = OpenChat(request, first, events)
            try:
                yield chat
            finally:
                caller.charge(chat.spent_tokens)

    async def tokenize(
        self, request_id: str, request: ParsedChat, caller: Caller, timeout_s: float
    ) -> tuple[Tokenized, ModelInfo]:
        """The ids that the model would see, and the model. Raises what a chat would be refused with."""
        models = await self._router.models()
        if not request.model and models:
            request = replace(request, model=models[0].model_id)
        model, _ = await self.model(request.model)
        asked = self._to_router(request_id, request, caller, timeout_s)
        with _naming_fields(request):
            return await self._router.tokenize(asked, spelled=request.spelled), model

    def _to_router(self, request_id: str, request: ParsedChat, caller: Caller, timeout_s: float) -> ChatRequest:
        tenant = "" if self._settings.tenants_share else caller.name
        return ChatRequest(
            _at_router(request_id, caller),
            request.model,
            request.messages,
            request.sampling,
            timeout_s=timeout_s,
            tenant_salt=tenant_salt(tenant, request.cache_salt),
            prompt=request.prompt,
            tools=request.tools,
            tool_choice=request.tool_choice,
            priority=request.priority,
        )

    async def models(self) -> tuple[tuple[ModelInfo, ...], int]:
        """The models that are served, and since when."""
        return await self._router.models(), self._started_at

    async def model(self, model_id: str) -> tuple[ModelInfo, int]:
        """Raises ModelNotFound."""
        models, since = await self.models()
        for model in models:
            if model.model_id == model_id:
                return model, since
        raise ModelNotFound(f"the model {model_id!r} is not served here", param="model")

    async def readiness(self) -> Readiness:
        """A router that cannot be reached is one more stage that is missing."""
        try:
            return await self._router.readiness()
        except TriptychError as error:
            logger.info("the router does not answer: %s", error.message)
            return Readiness(ready=False, missing=("router",))

    async def timeline(self, request_id: str, caller: Caller) -> Timeline:
        """Of one of the caller's own requests: what ``x-request-id`` said, or the ``id`` of the answer.

        Raises NotFound, also for requests of others.
        """
        own_id = canonical(request_id)
        return replace(await self._router.timeline(_at_router(own_id, caller)), request_id=own_id)


@contextmanager
def _naming_fields(request: ParsedChat) -> Iterator[None]:
    """Where the router names a part that is an item, name the field of the body that it came in."""
    try:
        yield
    except TriptychError as error:
        error.param = request.fields.get(error.param or "", error.param)
        raise


def _at_router(request_id: str, caller: Caller) -> str:
    """Names of requests are each key's own: no key can ask for what another one did."""
    return f"{caller.name}/{request_id}" if caller.name else request_id


def canonical(request_id: str) -> str:
    """Both names of a request, ``x-request-id`` and the answer's ``id``, lead to the one the router knows."""
    return request_id.removeprefix(CHAT_PREFIX).removeprefix(COMPLETION_PREFIX)
