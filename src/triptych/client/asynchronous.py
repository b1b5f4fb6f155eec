"""``AsyncClient``: the router's API as Python."""

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from uuid import uuid4

from triptych import errors
from triptych.client import checks, process
from triptych.client.answers import Answer, Choice
from triptych.client.images import Image, image_bytes
from triptych.client.messages import Prompt, RawPrompt, conversation, user
from triptych.client.options import ChatOptions, given
from triptych.client.retries import Retries, RetryPolicy
from triptych.client.sampling import sampling_params
from triptych.domain.chat import (
    MAX_TEMPLATE_KWARGS_CHARS,
    PRIORITY,
    ChatRequest,
    MediaPart,
    Message,
    ToolCall,
    ToolChoice,
)
from triptych.domain.generation import (
    ChatEvent,
    ChatFinished,
    ChoiceFinished,
    FinishReason,
    Reasoned,
    TokenChunk,
    ToolCallMade,
    Usage,
)
from triptych.domain.instance import ModelInfo
from triptych.domain.limits import MAX_MESSAGE_NBYTES
from triptych.domain.media import Modality
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.tenant import TENANT_NAME, WEIGHT, Tenant
from triptych.domain.timeline import Readiness, Timeline
from triptych.ports import Rng, Router
from triptych.rpc.routers import NO_ROUTER, ROUTER_LOST, Routers
from triptych.rpc.stubs import RouterStub
from triptych.runtime.tasks import TaskScope
from triptych.runtime.tls import TlsIdentity

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 120.0
QUERY_TIMEOUT_S = 10.0
_ASK_S = 10.0
"""Interval at which each of several routers is asked for its models, seconds."""
_TARGET = re.compile(r"[^/\s]+:\d{1,5}")
_MESSAGE_MARGIN_NBYTES = 1 << 20
"""Size allowed for a request without its media."""


class ChatStream:
    """A streaming answer: iterate it once for its chunks; then ``usage`` and ``finish_reason`` are known.

    Tool calls are not chunks: they appear in ``tool_calls`` when complete. Nor is reasoning, which grows in ``reasoning``.

    If its router is lost, the answer goes on at another one, or at the same if it is back in time. Any other error is raised by
    the iteration and not retried, since output was already shown.
    """

    def __init__(self, request: ChatRequest, first: ChatEvent, rest: AsyncGenerator[ChatEvent]) -> None:
        self.request_id = request.request_id
        self.model = request.model
        self.usage: Usage | None = None
        self.finish_reasons: dict[int, FinishReason] = {}
        """Finish reasons by choice."""
        self._calls: dict[int, list[ToolCall]] = {}
        self._thoughts: dict[int, list[str]] = {}
        self._first: ChatEvent | None = first
        self._rest = rest
        self._left = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first choice; None until it ends."""
        return self.finish_reasons.get(0)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls of the first choice, so far."""
        return self.tool_calls_of(0)

    def tool_calls_of(self, choice: int) -> tuple[ToolCall, ...]:
        """The tool calls of a choice so far, in order."""
        return tuple(self._calls.get(choice, ()))

    @property
    def reasoning(self) -> str:
        """Reasoning of the first choice, so far."""
        return self.reasoning_of(0)

    def reasoning_of(self, choice: int) -> str:
        """What the model has thought before this choice, so far."""
        return "".join(self._thoughts.get(choice, ()))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        while self.usage is None:
            event, self._first = self._first or await self._next(), None
            match event:
                case TokenChunk():
                    return event
                case ToolCallMade(call, _, choice):
                    self._calls.setdefault(choice, []).append(call)
                case Reasoned(text, choice):
                    self._thoughts.setdefault(choice, []).append(text)
                case ChoiceFinished(reason, choice):
                    self.finish_reasons[choice] = reason
                case ChatFinished(usage):
                    self.usage = usage
        raise StopAsyncIteration

    async def _next(self) -> ChatEvent:
        if self._left:
            raise errors.Cancelled("the stream was left before its end: read it within its context")
        return await _next(self._rest)

    async def aclose(self) -> None:
        """Cancel the rest of the answer, as leaving the context does."""
        self._left = True
        await self._rest.aclose()

    async def collect(self) -> Answer:
        """Read the rest and return it as one answer."""
        chunks: dict[int, list[TokenChunk]] = {}
        async for chunk in self:
            chunks.setdefault(chunk.choice, []).append(chunk)
        if self.usage is None or not self.finish_reasons:
            raise errors.InternalError("the answer ended without any choice")
        choices = (
            Choice(
                text="".join(chunk.text for chunk in chunks.get(choice, ())),
                token_ids=tuple(token_id for chunk in chunks.get(choice, ()) for token_id in chunk.token_ids),
                finish_reason=reason,
                logprobs=tuple(entry for chunk in chunks.get(choice, ()) for entry in chunk.logprobs),
                tool_calls=self.tool_calls_of(choice),
                reasoning=self.reasoning_of(choice),
            )
            for choice, reason in sorted(self.finish_reasons.items())
        )
        return Answer(self.request_id, self.model, tuple(choices), self.usage)


class AsyncClient:
    """Client of the routers at ``target``: ``host:port``, several separated by commas, or an object that implements
    ``ports.Router``. Of several, each request goes to one that answers and serves the model.

    ``tls`` is the identity for a cluster that uses mutual TLS: a certificate signed by its authority.

    Every call has a deadline over all its attempts: ``timeout_s``, or the client's own. Cancelling the waiting task, or
    leaving a stream's context, cancels the request at every stage. Raises only ``triptych.errors``.

    A client belongs to the process and the event loop of its first call.
    """

    def __init__(
        self,
        target: str | Router,
        *,
        model: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        tls: TlsIdentity | None = None,
        rng: Rng | None = None,
    ) -> None:
        self._target = target if not isinstance(target, str) else _addresses(target)
        if not isinstance(target, str) and not callable(getattr(target, "chat", None)):
            raise _no_target(target)
        self._tls = None if tls is None else checks.of_type("tls", tls, TlsIdentity, "a triptych.client.TlsIdentity")
        self._model = None if model is None else checks.text("model", model)
        self._timeout_s = checks.duration_s("timeout_s", timeout_s)
        policy = checks.of_type("retry", retry, RetryPolicy, "a triptych.client.RetryPolicy")
        self._retries = Retries(policy, rng or random.SystemRandom())
        self._opened: Router | None = None
        self._opened_by: tuple[int, asyncio.AbstractEventLoop] | None = None
        """Process and event loop of the connection."""
        self._exit = AsyncExitStack()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, cancelling running calls.

        Raises InvalidRequest in a forked process, or in another event loop while the client's own still runs.
        """
        if self._opened_by is None or not self._opened_by[1].is_closed():
            self._check_loop()
        self._closed = True
        await self._exit.aclose()

    # --- ask ---

    async def chat(self, prompt: Prompt, images: Sequence[Image] = (), **options: Unpack[ChatOptions]) -> Answer:
        """Return the whole answer. ``prompt`` is a question about ``images``, a conversation with its own, or a raw
        prompt.
        """
        async with self.stream(prompt, images, **options) as answer:
            return await answer.collect()

    @asynccontextmanager
    async def stream(
        self, prompt: Prompt, images: Sequence[Image] = (), **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[ChatStream]:
        """Stream the answer. On entering the context it has begun, or an error is raised."""
        now_s = asyncio.get_running_loop().time
        values = given(options)
        end_s = now_s() + checks.duration_s("timeout_s", values.get("timeout_s", self._timeout_s))
        template = replace(
            await _chat_request(prompt, images, values.get("tools", ())),
            sampling=sampling_params(values),
            tenant_salt=checks.of_type("tenant_salt", values.get("tenant_salt", b""), bytes, "bytes"),
            priority=checks.integer("priority", values.get("priority", 0), int(PRIORITY.low), int(PRIORITY.high)),
            tenant=_tenant(values.get("tenant")),
            tool_choice=_tool_choice(values.get("tool_choice", ToolChoice())),
            template_kwargs=_template_kwargs(values.get("template_kwargs", {})),
            separates_reasoning=True,
        )
        template = replace(template, model=await self._model_for(values.get("model"), end_s))

        async with AsyncExitStack() as stack:

            async def begin(router: Router) -> ChatStream:
                request = replace(template, request_id=uuid4().hex, timeout_s=max(0.0, end_s - now_s()))
                events = self._events(router, request)
                try:
                    first = await _next(events)
                except BaseException:
                    await events.aclose()
                    raise
                return await stack.enter_async_context(aclosing(ChatStream(request, first, events)))

            yield await self._attempts(begin, end_s)

    # --- encode ---

    @asynccontextmanager
    async def resolve(
        self,
        images: Sequence[Image],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        tenant_salt: bytes = b"",
        priority: int = 0,
    ) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        """Have images encoded, for a reader that finds their embeddings by ``ResolvedItem.uuid`` (docs/vllm.md).

        They are held until the context is left, and at most for ``timeout_s``.
        """
        now_s = asyncio.get_running_loop().time
        end_s = now_s() + checks.duration_s("timeout_s", self._timeout_s if timeout_s is None else timeout_s)
        given_images = checks.several("images", images, "a list of images")
        media = await asyncio.to_thread(lambda: tuple(map(image_bytes, given_images)))
        _check_nbytes(sum(map(len, media)))
        template = ResolveRequest(
            request_id="",
            model=await self._model_for(model, end_s),
            media=tuple(MediaPart(Modality.IMAGE, data) for data in media),
            tenant_salt=checks.of_type("tenant_salt", tenant_salt, bytes, "bytes"),
            priority=checks.integer("priority", priority, int(PRIORITY.low), int(PRIORITY.high)),
        )

        async with AsyncExitStack() as stack:

            async def begin(router: Router) -> tuple[ResolvedItem, ...]:
                request = replace(template, request_id=uuid4().hex, timeout_s=max(0.0, end_s - now_s()))
                held = router.resolve(request)
                try:
                    resolution = await _next(held)
                except BaseException:
                    await held.aclose()
                    raise
                await stack.enter_async_context(aclosing(held))
                return resolution

            yield await self._attempts(begin, end_s)

    # --- look ---

    async def tokenize(
        self,
        prompt: Prompt,
        images: Sequence[Image] = (),
        *,
        model: str | None = None,
        timeout_s: float = QUERY_TIMEOUT_S,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """The token ids that ``chat`` would prefill, with a placeholder for each position of an image."""
        end_s = asyncio.get_running_loop().time() + checks.duration_s("timeout_s", timeout_s)
        template = await _chat_request(prompt, images, tools)
        name = await self._model_for(model, end_s)
        request = replace(template, request_id=uuid4().hex, model=name, timeout_s=timeout_s)
        return (await self._attempts(lambda router: router.tokenize(request), end_s)).token_ids

    async def models(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> tuple[ModelInfo, ...]:
        """The models served."""
        return await self._query(_models, timeout_s)

    async def ready(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> Readiness:
        """Whether every stage has an instance, and the list of instances."""
        return await self._query(lambda router: router.readiness(), timeout_s)

    async def timeline(self, request_id: str, *, timeout_s: float = QUERY_TIMEOUT_S) -> Timeline:
        """Timeline of a request, stage by stage. Raises NotFound when the router's bounded history no longer has it."""
        name = checks.text("request_id", request_id)
        return await self._query(lambda router: router.timeline(name), timeout_s)

    # --- how ---

    async def _router(self) -> Router:
        if self._closed:
            raise errors.Cancelled("the client is closed")
        self._check_loop()
        if self._opened is None:
            self._opened = self._open()
        if isinstance(self._opened, Routers):
            await self._opened.asked()
        return self._opened

    def _open(self) -> Router:
        if not isinstance(self._target, tuple):
            return self._target
        process.use_grpc()
        loop = asyncio.get_running_loop()
        self._opened_by = os.getpid(), loop  # a channel belongs to the loop that creates it
        routers = Routers(lambda address: RouterStub(address, self._tls))
        routers.use(self._target)
        scope = TaskScope("routers", limit=1)
        scope.spawn(routers.keep_asking(_ASK_S), name="models")

        async def close() -> None:
            if not loop.is_closed():  # else its tasks have ended
                await scope.close()
            await routers.close()

        self._exit.push_async_callback(close)
        return routers

    def _check_loop(self) -> None:
        """Raises InvalidRequest outside the process and event loop in which the connection was opened."""
        if self._opened_by is not None:
            pid, loop = self._opened_by
            if pid != os.getpid():
                raise process.forked()
            if loop is not asyncio.get_running_loop():
                raise errors.InvalidRequest(
                    "this client belongs to the event loop in which it was first used: make one in each loop, and "
                    "close it there"
                )

    async def _events(self, router: Router, request: ChatRequest) -> AsyncGenerator[ChatEvent]:
        async with aclosing(router.chat(request)) as stream:
            with self._while_open():
                async for events in stream:
                    for event in events:
                        yield event

    @contextmanager
    def _while_open(self) -> Generator[None]:
        """Translate the cancellation of calls by ``close`` into an error of the tree for their callers."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise errors.Cancelled("the client is closed") from None
            raise

    async def _model_for(self, model: str | None, end_s: float) -> str:
        """The requested model, the client's own, or the first one served (looked up once)."""
        if model is not None:
            checks.text("model", model)
        elif self._model is None:
            models = await self._attempts(_models, end_s)
            if not models:
                raise errors.Unavailable("no model is served yet")
            self._model = models[0].model_id
        return model or self._model or ""

    async def _query(self, call: Callable[[Router], Awaitable[T]], timeout_s: float) -> T:
        end_s = asyncio.get_running_loop().time() + checks.duration_s("timeout_s", timeout_s)
        return await self._attempts(call, end_s)

    async def _attempts(self, call: Callable[[Router], Awaitable[T]], end_s: float) -> T:
        """Retry a call until it succeeds, within deadline, attempts and budget."""
        loop = asyncio.get_running_loop()
        attempt = 1
        while True:
            try:
                with self._while_open():
                    async with asyncio.timeout_at(end_s):
                        result = await call(await self._router())
            except TimeoutError:
                raise self._deadline_exceeded() from None
            except errors.TriptychError as raised:
                error = self._with_target(raised)
                wait_s = self._retries.wait_s(error, attempt, end_s - loop.time())
                if wait_s is None:
                    raise error from None
                await asyncio.sleep(wait_s)
                attempt += 1
            else:
                self._retries.succeeded()
                return result

    def _with_target(self, error: errors.TriptychError) -> errors.TriptychError:
        """Add the target's name to the error when no router was reached at all."""
        if not isinstance(self._opened, Routers):
            return error
        if isinstance(error, errors.Unavailable) and error.message == NO_ROUTER:
            return errors.Unavailable(
                f"no router at {self._shown_target}: another service answers there. `triptych up` shows where its router's gRPC is"
            )
        unreached = isinstance(error, errors.Unavailable) and not error.sent_by_peer and self._opened.unreached
        if unreached and isinstance(error, errors.InstanceLost) and error.message != ROUTER_LOST:
            return errors.Unavailable(f"no router can be called at {self._shown_target}: {error.message}")
        if unreached:
            return errors.Unavailable(
                f"nothing answers at {self._shown_target}: is a router's gRPC there? `triptych up` shows where its own is"
            )
        return self._deadline_exceeded() if isinstance(error, errors.DeadlineExceeded) else error

    def _deadline_exceeded(self) -> errors.DeadlineExceeded:
        if isinstance(self._opened, Routers) and not self._opened.reached:
            return errors.DeadlineExceeded(f"there was no connection to {self._shown_target} within the deadline")
        return errors.DeadlineExceeded("the call did not end within its deadline")

    @property
    def _shown_target(self) -> str:
        return " or ".join(self._target) if isinstance(self._target, tuple) else "the router"


def _addresses(target: str) -> tuple[str, ...]:
    """Raises InvalidRequest."""
    addresses = tuple(dict.fromkeys(address.strip() for address in target.split(",")))
    if not all(map(_TARGET.fullmatch, addresses)):
        raise _no_target(target)
    return addresses


def _no_target(target: object) -> errors.InvalidRequest:
    text = f"{target!r} is not HOST:PORT,... of routers' gRPC (a URL is what the gateway has)"
    return errors.InvalidRequest(text, param="target")


async def _models(router: Router) -> tuple[ModelInfo, ...]:
    models = await router.models()
    if isinstance(router, Routers) and not models and router.unreached:
        raise errors.Unavailable("no router answers")
    return models


async def _chat_request(prompt: Prompt, images: Sequence[Image], tools: Sequence[Mapping[str, Any]]) -> ChatRequest:
    """A request without id, model and deadline. Raises InvalidRequest and its subclasses."""
    images = () if images is None else checks.several("images", images, "a list of images")
    if isinstance(prompt, RawPrompt):
        if images or tools:
            raise errors.InvalidRequest("a raw prompt has neither images nor tools", param="prompt")
        return ChatRequest("", "", (), prompt=checks.text("prompt", prompt.text))
    messages: tuple[Message, ...]
    if isinstance(prompt, str):
        checks.text("prompt", prompt)
        messages = (await asyncio.to_thread(user, prompt, images) if images else user(prompt),)
    elif images:
        raise errors.InvalidRequest("a conversation has its images in its messages", param="images")
    else:
        messages = conversation(prompt)
    template = ChatRequest("", "", messages, tools=_tools(tools))
    _check_nbytes(sum(len(part.data) for part in template.media))
    return template


def _check_nbytes(nbytes: int) -> None:
    limit = MAX_MESSAGE_NBYTES - _MESSAGE_MARGIN_NBYTES
    if nbytes > limit:
        raise errors.RequestTooLarge(f"the images have {nbytes} bytes together, the limit is {limit}")


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise errors.InvalidRequest("tools is a list of tools, each a mapping", param="tools")
    return _json("tools", list(tools)) if tools else ""


def _template_kwargs(given: Any) -> str:
    if not isinstance(given, Mapping):
        raise checks.wrong("template_kwargs", 'a mapping, as {"enable_thinking": False}', given)
    written = _json("template_kwargs", dict(given), ensure_ascii=False) if given else ""
    if len(written) > MAX_TEMPLATE_KWARGS_CHARS:
        reason = f"template_kwargs have {len(written)} characters of JSON, the limit is {MAX_TEMPLATE_KWARGS_CHARS}"
        raise errors.InvalidRequest(reason, param="template_kwargs")
    return checks.text("template_kwargs", written)


def _json(name: str, value: Any, *, ensure_ascii: bool = True) -> str:
    """A parameter as JSON. Raises InvalidRequest."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidRequest(f"{name} cannot be written as JSON: {error}", param=name) from None


def _tool_choice(choice: Any) -> ToolChoice:
    wanted = 'a triptych.client.ToolChoice, as ToolChoice(required=True), ToolChoice(name="...") or left out'
    checked = checks.of_type("tool_choice", choice, ToolChoice, wanted)
    for part, cls in ((checked.required, bool), (checked.parallel, bool), (checked.name, str)):
        checks.of_type("tool_choice", part, cls, f"made of other types, here a {cls.__name__}")
    checks.text("tool_choice", checked.name)
    return checked


def _tenant(tenant: Any) -> Tenant | None:
    if tenant is None:
        return None
    wanted = 'a name, or a triptych.client.Tenant, as Tenant("team", weight=2)'
    checked = Tenant(tenant) if isinstance(tenant, str) else checks.of_type("tenant", tenant, Tenant, wanted)
    name, weight = checks.text("tenant", checked.name, wanted), checks.number("tenant", checked.weight)
    for fault in (TENANT_NAME.fault("its name", name), WEIGHT.fault("its weight", weight)):
        if fault:
            raise errors.InvalidRequest(f"tenant: {fault}", param="tenant")
    return checked


async def _next(events: AsyncGenerator[T]) -> T:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise errors.InstanceLost("the answer broke off before its end") from None
