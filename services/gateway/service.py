"""The gateway as an object: requests in, domain types to the router, answers out. It knows no HTTP."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from triptych.domain.chat import ChatRequest
from triptych.domain.generation import ChatEvent, ChatFinished, ChoiceFinished, FinishReason, TokenChunk, Usage
from triptych.domain.instance import ModelInfo
from triptych.domain.timeline import Readiness, Timeline
from triptych.errors import InstanceLost, ModelNotFound, RequestTooLarge, Unavailable
from triptych.ports import Offload, Router

from .answers import COMPLETION_PREFIX
from .openai_api import ParsedChat, parse
from .scope import Admission, Hold
from .settings import GatewaySettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that has ended."""

    text: str
    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class OpenChat:
    """An answer whose first event has arrived: from here on nothing can be refused any more."""

    request: ParsedChat
    first: ChatEvent
    rest: AsyncGenerator[ChatEvent]

    async def events(self) -> AsyncGenerator[ChatEvent]:
        """All events up to and including ChatFinished. Raises InstanceLost when the stream ends without it."""
        event = self.first
        while True:
            yield event
            if isinstance(event, ChatFinished):
                return
            event = await _next(self.rest)

    async def collect(self) -> WholeAnswer:
        """The whole answer."""
        texts: list[str] = []
        reason = FinishReason.STOP
        async with aclosing(self.events()) as events:
            async for event in events:
                match event:
                    case TokenChunk(text=text):
                        texts.append(text)
                    case ChoiceFinished(reason=reason):
                        pass
                    case ChatFinished(usage=usage):
                        return WholeAnswer("".join(texts), reason, usage)
        raise AssertionError("events() ends with ChatFinished or raises")


async def _next(events: AsyncGenerator[ChatEvent]) -> ChatEvent:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise InstanceLost("the answer broke off before its end") from None


class Gateway:
    """What the routes call. ``wall_s`` gives seconds since 1970, for the ``created`` fields of answers."""

    def __init__(
        self, router: Router, offload: Offload, settings: GatewaySettings, wall_s: Callable[[], float]
    ) -> None:
        self._router = router
        self._offload = offload
        self._settings = settings
        self._wall_s = wall_s
        self._started_at = int(wall_s())
        self.admission = Admission(settings.max_concurrent_requests, settings.max_buffered_bytes)

    @property
    def settings(self) -> GatewaySettings:
        return self._settings

    def created(self) -> int:
        return int(self._wall_s())

    async def read_body(self, chunks: AsyncIterator[bytes], announced_bytes: int | None, hold: Hold) -> bytes:
        """Collect a body within its bounds. Raises RequestTooLarge, or Overloaded when all bodies together are."""
        limit = self._settings.max_body_bytes
        if announced_bytes is not None:
            if announced_bytes > limit:
                raise RequestTooLarge(f"the body has {announced_bytes} bytes, the limit is {limit}")
            hold.grow_to(announced_bytes)
        body = bytearray()
        async for chunk in chunks:
            if len(body) + len(chunk) > limit:
                raise RequestTooLarge(f"the body has more than {limit} bytes, which is the limit")
            body += chunk
            hold.grow_to(len(body))
        return bytes(body)

    async def parse(self, body: bytes) -> ParsedChat:
        """Raises InvalidRequest or InvalidMedia."""
        if len(body) <= self._settings.parse_inline_bytes:
            return parse(body, self._settings.max_image_bytes)
        return await self._offload.run(parse, body, self._settings.max_image_bytes)

    @asynccontextmanager
    async def chat(self, request_id: str, request: ParsedChat, timeout_s: float) -> AsyncGenerator[OpenChat]:
        """Ask the router and wait for the first event; leaving the context cancels what still runs.

        Raises whatever error comes instead of a first event.
        """
        events = self._router.chat(
            ChatRequest(request_id, request.model, request.messages, request.sampling, timeout_s=timeout_s)
        )
        async with aclosing(events):
            yield OpenChat(request, await _next(events), events)

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
        except Unavailable as error:
            logger.info("the router does not answer: %s", error.message)
            return Readiness(ready=False, missing=("router",))

    async def timeline(self, request_id: str) -> Timeline:
        """``request_id`` is what ``x-request-id`` said, or the ``id`` of the answer. Raises NotFound."""
        return await self._router.timeline(canonical(request_id))


def canonical(request_id: str) -> str:
    """Both names of a request, ``x-request-id`` and the answer's ``id``, lead to the one the router knows."""
    return request_id.removeprefix(COMPLETION_PREFIX)
