"""The gateway without HTTP: turns parsed requests into calls of the router."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from random import Random

from starlette.datastructures import Headers

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.instance import ModelInfo
from triptych.domain.lora import LoadLora
from triptych.domain.timeline import Readiness, Timeline
from triptych.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    RequestTimeout,
    RequestTooLarge,
    TriptychError,
)
from triptych.ports import Clock, Offload, Router
from triptych.runtime.clock import monotonic

from . import edge
from .admission import Admission, Hold
from .keys import Caller, KeyRing
from .media import RemoteMedia
from .open_answer import OpenAnswer
from .openai_api import ParsedRequest, tenant_salt
from .request_ids import canonical
from .response_store import ResponseStore
from .settings import GatewaySettings
from .several import joined
from .shedding import Shedding

logger = logging.getLogger(__name__)

_TIMELINE_S = 1.0
"""Longest wait of a cancelled request for the router to report its cost, seconds."""
_LORA_FIELDS = {"name": "lora_name", "directory": "lora_path"}
"""Fields of orders as the body names them."""

_TIERS = {"flex": 1, "priority": -1}
"""Priorities of tiers; 0 of others."""

Parse = Callable[[bytearray, int], ParsedRequest]
"""(body, largest item in bytes) -> the request. Raises InvalidRequest or InvalidMedia."""


class Gateway:
    """Called by the routes. ``wall_s`` returns seconds since 1970, for the ``created`` fields of answers."""

    def __init__(
        self,
        router: Router,
        offload: Offload,
        settings: GatewaySettings,
        wall_s: Callable[[], float],
        *,
        keys: KeyRing,
        media: RemoteMedia,
        clock: Clock = monotonic,
    ) -> None:
        self._router = router
        self._offload = offload
        self._settings = settings
        self._wall_s = wall_s
        self._started_at = int(wall_s())
        self._media = media
        self.keys = keys
        self.admission = Admission(
            settings.max_concurrent_requests, settings.max_buffered_bytes, clock, keys=keys.count
        )
        self.responses = ResponseStore(settings.response_store, clock)
        self._clock = clock
        self.shedding = Shedding(clock, Random())  # noqa: S311 - it spreads Retry-After

    @property
    def settings(self) -> GatewaySettings:
        return self._settings

    def shed(self, headers: Headers) -> Overloaded | None:
        """Why a request is refused unread, as the gateway is behind; None if it is not."""
        if not self.shedding.came():
            return None
        caller = self.keys.find(edge.authorizations(headers))
        try:
            timeout_s = self.timeout_s(headers)
        except InvalidRequest:
            timeout_s = self._settings.request_timeout_s
        return self.shedding.refusal(None if caller is None else caller.tenant, timeout_s)

    def timeout_s(self, headers: Headers) -> float:
        """A request's timeout, by its headers or the settings. Raises InvalidRequest."""
        return edge.timeout_s(headers, self._settings.request_timeout_s, self._settings.max_request_timeout_s)

    def created(self) -> int:
        return int(self._wall_s())

    async def read_body(self, chunks: AsyncIterator[bytes], announced_bytes: int | None, hold: Hold) -> bytearray:
        """Collect a body within its limits, in one copy.

        An announced length reserves no memory: a client that announces much and sends nothing holds nothing. Raises
        RequestTooLarge, Overloaded when all bodies together are too large, RequestTimeout when it arrives too slowly.
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

    async def parse(self, how: Parse, body: bytearray, hold: Hold) -> ParsedRequest:
        """The request with all its media. Raises InvalidRequest, InvalidMedia or Overloaded."""
        if len(body) <= self._settings.parse_inline_bytes:
            request = how(body, self._settings.max_item_bytes)
        else:
            with self.shedding.unbegun() as work:

                def parse() -> ParsedRequest:
                    work.begun = True
                    return how(body, self._settings.max_item_bytes)

                request = await self._offload.run(parse)
        return await self._media.complete(request, hold.grow)

    @asynccontextmanager
    async def chat(
        self, request_id: str, request: ParsedRequest, caller: Caller, timeout_s: float
    ) -> AsyncGenerator[OpenAnswer]:
        """Call the router and wait for the first event; leaving the context cancels the request. The caller is charged
        for what was computed, even if it left early or timed out. Raises the error that comes instead of a first event, or RateLimited.
        """
        request = _by_tier(request, caller)
        caller.check_priority(request.priority)
        chat_request = self._to_router(request_id, request, caller, timeout_s)
        if caller.is_limited:
            caller.take_items(len(chat_request.media))
        further = [
            self._to_router(f"{request_id}.{number}", replace(request, prompt=prompt), caller, timeout_s)
            for number, prompt in enumerate(request.further, 1)
        ]
        chats = [self._router.chat(each) for each in (chat_request, *further)]
        answer = OpenAnswer(request, joined(chats, request.sampling.n) if further else chats[0])
        try:
            async with aclosing(answer):
                with _naming_fields(request.fields), self._noting_what_the_router_says(caller.name, timeout_s):
                    await answer.begin()
                yield answer
        except (asyncio.CancelledError, DeadlineExceeded):
            if caller.has_token_limit and not answer.finished:
                for each in (chat_request, *further):
                    answer.spent_tokens += await self._spent_prompt_tokens(each.request_id)
            raise
        finally:
            caller.charge(answer.spent_tokens)

    @contextmanager
    def _noting_what_the_router_says(self, key: str, timeout_s: float) -> Iterator[None]:
        asked_s = self._clock()
        try:
            yield
        except Overloaded as error:
            if type(error) is Overloaded:  # and not that an arena is full, for which a request may have waited
                self.shedding.refused(key, error, self._clock() - asked_s)
            raise
        except (DeadlineExceeded, asyncio.CancelledError):
            if self._clock() - asked_s >= timeout_s:  # else the client has left
                self.shedding.unanswered(key)
            raise
        self.shedding.accepted(key)

    async def _spent_prompt_tokens(self, request_id: str) -> int:
        """The prompt's tokens if a text instance has received it; otherwise the tokens of the items sent to an encoder."""
        try:
            async with asyncio.timeout(_TIMELINE_S):
                timeline = await self._router.timeline(request_id)
        except (TriptychError, TimeoutError):
            logger.warning("request %s: its prompt is not charged: the router did not report its tokens", request_id)
            return 0
        if timeline.text_attempts:
            return timeline.prompt_tokens
        return sum(item.tokens for item in timeline.items if item.encode_attempts)

    async def tokenize(
        self, request_id: str, request: ParsedRequest, caller: Caller, timeout_s: float
    ) -> tuple[Tokenized, ModelInfo]:
        """The prompt's token ids, and the model. Raises the same errors as a chat."""
        models = await self._router.models()
        if not request.model and models:
            request = replace(request, model=models[0].model_id)
        model, _ = await self.model(request.model)
        chat_request = self._to_router(request_id, request, caller, timeout_s)
        with _naming_fields(request.fields):
            return await self._router.tokenize(chat_request, return_token_strs=request.return_token_strs), model

    def _to_router(self, request_id: str, request: ParsedRequest, caller: Caller, timeout_s: float) -> ChatRequest:
        tenant = "" if self._settings.tenants_share else caller.name
        return ChatRequest(
            _at_router(request_id, caller),
            request.model,
            request.messages,
            request.sampling,
            timeout_s=timeout_s,
            tenant_salt=tenant_salt(tenant, request.cache_salt),
            prompt="" if isinstance(request.prompt, tuple) else request.prompt,
            prompt_tokens=request.prompt if isinstance(request.prompt, tuple) else (),
            tools=request.tools,
            tool_choice=request.tool_choice,
            template_kwargs=request.template_kwargs,
            separates_reasoning=request.separates_reasoning,
            streams_arguments=request.stream,
            priority=request.priority,
            tenant=caller.tenant if caller.name else None,
            whole=not request.stream,
        )

    async def models(self) -> tuple[tuple[ModelInfo, ...], int]:
        """The models that are served, and the time since when."""
        return await self._router.models(), self._started_at

    async def model(self, model_id: str) -> tuple[ModelInfo, int]:
        """Raises ModelNotFound."""
        models, since = await self.models()
        for model in models:
            if model.model_id == model_id:
                return model, since
        raise ModelNotFound(f"the model {model_id!r} is not served", param="model")

    def check_operator(self, caller: Caller) -> None:
        """Raises PermissionDenied unless the caller may change what is served: with an operator's key, or on this machine where the
        gateway serves nobody else.
        """
        if not caller.is_operator and (caller.name or self._settings.hosts is None):
            raise PermissionDenied("this needs an API key with operator = true")

    async def load_lora(self, order: LoadLora) -> tuple[ModelInfo, int]:
        """The model that the adapter is served as, and the time since when. Raises what ``ports.Loras`` raises."""
        with _naming_fields(_LORA_FIELDS):
            lora = await self._router.load_lora(order)
        return await self.model(lora.name)

    async def unload_lora(self, name: str) -> None:
        with _naming_fields(_LORA_FIELDS):
            await self._router.unload_lora(name)

    async def readiness(self) -> Readiness:
        """An unreachable router is reported as a missing stage."""
        try:
            return await self._router.readiness()
        except TriptychError as error:
            logger.info("the router is not reachable: %s", error.message)
            return Readiness(ready=False, missing=("router",))

    async def timeline(self, request_id: str, caller: Caller) -> Timeline:
        """The timeline of one of the caller's own requests, by ``x-request-id`` or the answer's ``id``.

        Raises NotFound, also for other callers' requests.
        """
        own_id = canonical(request_id)
        return replace(await self._router.timeline(_at_router(own_id, caller)), request_id=own_id)


@contextmanager
def _naming_fields(fields: Mapping[str, str]) -> Iterator[None]:
    """Replace what the router's error names by the body's field."""
    try:
        yield
    except TriptychError as error:
        named = fields.get(error.param or "")
        if named is not None and error.param is not None:
            if error.message.startswith(f"{error.param}:"):
                error.message = named + error.message.removeprefix(error.param)
            error.param = named
        raise


def _by_tier(request: ParsedRequest, caller: Caller) -> ParsedRequest:
    """The request with the priority of its tier, or the next one that its key allows."""
    if not request.service_tier:
        return request
    wanted = _TIERS.get(request.service_tier, 0)
    priority, ignored = caller.allowed_priority(wanted), request.ignored
    if priority != wanted or request.service_tier == "scale":
        ignored = (*ignored, "service_tier")
    return replace(request, priority=priority, ignored=ignored)


def _at_router(request_id: str, caller: Caller) -> str:
    """Prefix the id with the key's name, so that no key can look up another's requests."""
    return f"{caller.name}/{request_id}" if caller.name else request_id
