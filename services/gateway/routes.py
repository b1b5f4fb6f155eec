"""The routes and their endpoints."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych import __version__
from triptych.domain.chat import Tokenized
from triptych.domain.generation import (
    ChatEvent,
    ChatFinished,
    ChoiceFinished,
    FieldsIgnored,
    Reasoned,
    TokenChunk,
    ToolArguments,
    ToolCallMade,
)
from triptych.domain.instance import ModelInfo
from triptych.errors import Overloaded, RequestTooLarge, TriptychError
from triptych.ports import Clock
from triptych.runtime.metrics import Metrics
from triptych.runtime.telemetry import Telemetry

from . import answer_types as api
from . import edge, request_fields
from .answers import (
    ChatForm,
    CompletionForm,
    Form,
    model_body,
    tokens_body,
)
from .cors import Cors
from .exchange import Exchange, admitted
from .half_closed import FILLER
from .lifetime import GRACE_S
from .messages_api import parse_count_tokens, parse_messages
from .messages_form import MessagesForm, TokenCount
from .observe import MetricsEndpoint, Observed
from .open_answer import OpenAnswer
from .openai_api import (
    ParsedRequest,
    parse_chat,
    parse_completion,
    parse_load_lora,
    parse_tokenize,
    parse_unload_lora,
)
from .openapi import READINESS, TIMELINE, document_json
from .responses_api import parse_responses
from .responses_routes import InputItems, Responses
from .service import Gateway, Parse

_JSON = "application/json"
_COMMENT = b":\n\n"
"""Between server-sent events, without a meaning."""
_MAX_ORDER_NBYTES = 64 << 10
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def create_app(
    gateway: Gateway,
    *,
    clock: Clock,
    new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    connections: Callable[[], int] = lambda: 0,
    telemetry: Telemetry | None = None,
) -> ASGIApp:
    """The ASGI application. ``new_id`` makes an id where the client sent none; ``connections`` counts the open ones."""
    limit, telemetry = gateway.settings.max_connections, telemetry or Telemetry()

    def refused() -> TriptychError | None:
        if connections() <= limit:
            return None
        return Overloaded(f"{limit} connections are open, which is the limit")

    router = Router(make_routes(gateway, telemetry.metrics, clock), redirect_slashes=False)
    app: ASGIApp = edge.Edge(
        edge.AuthMiddleware(router, keys=gateway.keys, shedding=gateway.shedding),
        new_id=new_id,
        taken=gateway.admission.is_running,
        refused=refused,
        shed=gateway.shed,
        hosts=gateway.settings.hosts,
        origins=gateway.settings.allowed_origins,
        clock=clock,
    )
    if gateway.settings.allowed_origins:
        app = Cors(app, gateway.settings.allowed_origins, new_id)
    return Observed(app, telemetry, clock)


def make_routes(gateway: Gateway, metrics: Metrics, clock: Clock) -> list[Route]:
    endpoints, responses = Endpoints(gateway), Responses(gateway)

    def post(path: str, parse: Parse, respond: Respond) -> Route:
        return Route(path, Post(gateway, parse, respond, clock), methods=["POST"])

    return [
        post("/v1/chat/completions", parse_chat, Generate(gateway, _completing(gateway, ChatForm))),
        post("/v1/completions", parse_completion, Generate(gateway, _completing(gateway, CompletionForm))),
        post("/v1/responses", parse_responses, Generate(gateway, responses.open)),
        post("/v1/messages", parse_messages, Generate(gateway, _messages)),
        post("/v1/messages/count_tokens", parse_count_tokens, Tokenize(gateway, _token_count)),
        post("/tokenize", parse_tokenize, Tokenize(gateway, _tokens)),
        Route("/v1/responses/{response_id}", responses.retrieve),
        Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/input_items", InputItems(gateway, clock), methods=["GET"]),
        Route("/v1/load_lora_adapter", endpoints.load_lora, methods=["POST"]),
        Route("/v1/unload_lora_adapter", endpoints.unload_lora, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{model_id:path}", endpoints.model),
        Route("/v1/requests/{request_id}/timeline", endpoints.timeline),
        Route("/openapi.json", endpoints.openapi),
        Route("/health", endpoints.health),
        Route("/ping", endpoints.health, methods=["GET", "POST"]),
        Route("/version", endpoints.version),
        Route("/load", endpoints.load),
        Route("/ready", endpoints.ready),
        Route("/metrics", MetricsEndpoint(metrics).__call__),
    ]


class Endpoints:
    """The GET endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._openapi = document_json()

    async def health(self, _: Request) -> Response:
        """Liveness: depends on nothing outside this process."""
        return JSONResponse(api.Health(status="ok"))

    async def version(self, _: Request) -> Response:
        return JSONResponse(api.Version(version=__version__))

    async def load(self, _: Request) -> Response:
        """Requests that run in this process."""
        return JSONResponse(api.Load(server_load=self._gateway.admission.requests))

    async def openapi(self, _: Request) -> Response:
        return Response(self._openapi, media_type=_JSON)

    async def ready(self, _: Request) -> Response:
        """200 if every stage of a model has an instance, else 503 with what is missing."""
        readiness = await self._gateway.readiness()
        return Response(READINESS.dump_json(readiness), 200 if readiness.ready else 503, media_type=_JSON)

    async def models(self, _: Request) -> Response:
        models, since = await self._gateway.models()
        listed: api.Models = {"object": "list", "data": [model_body(model, since) for model in models]}
        return JSONResponse(listed)

    async def model(self, request: Request) -> Response:
        model, since = await self._gateway.model(request.path_params["model_id"])
        return JSONResponse(model_body(model, since))

    async def load_lora(self, request: Request) -> Response:
        order = parse_load_lora(await self._order(request))
        model, since = await self._gateway.load_lora(order)
        return JSONResponse(model_body(model, since))

    async def unload_lora(self, request: Request) -> Response:
        name = parse_unload_lora(await self._order(request))
        await self._gateway.unload_lora(name)
        return JSONResponse(api.Unloaded(id=name, object="model", deleted=True))

    async def _order(self, request: Request) -> bytearray:
        """The body of an operator's order. Raises PermissionDenied, RequestTooLarge."""
        self._gateway.check_operator(request.state.caller)
        edge.check_encoding(request.state.headers)
        body = bytearray()
        async for chunk in edge.body_chunks(request.scope, request.receive):
            body += chunk
            if len(body) > _MAX_ORDER_NBYTES:
                raise RequestTooLarge(f"the body has more than {_MAX_ORDER_NBYTES} bytes, which is the limit")
        return body

    async def timeline(self, request: Request) -> Response:
        timeline = await self._gateway.timeline(request.path_params["request_id"], request.state.caller)
        return Response(TIMELINE.dump_json(timeline), media_type=_JSON)


Respond = Callable[[Exchange, Any], Awaitable[None]]
"""Answers what the route's ``Parse`` returns."""
Open = Callable[[Exchange, Any], tuple[Form, ParsedRequest]]
"""The form of the answer, and the request as it goes to the router."""


class Post:
    """A POST route as an ASGI application: admits, reads and parses the body, and cancels when the client leaves."""

    def __init__(self, gateway: Gateway, parse: Parse, respond: Respond, clock: Clock) -> None:
        self._gateway = gateway
        self._parse = parse
        self._respond = respond
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["state"]["headers"]
        edge.check_encoding(headers)
        exchange: Exchange | None = None
        try:
            async with admitted(self._gateway, scope, receive, send, self._clock) as exchange:
                chunks = edge.body_chunks(scope, receive)
                body = await self._gateway.read_body(chunks, edge.announced_bytes(headers), exchange.hold)
                async with exchange.lifetime.ended_by(lambda: edge.disconnected(receive)):
                    request = await self._gateway.parse(self._parse, body, exchange.hold)
                    del body
                    await self._respond(exchange, request)
        except Exception as error:
            if exchange is None or exchange.streaming is None:
                raise
            last = exchange.streaming.failed(edge.as_known(error, exchange.request_id))
            with suppress(TimeoutError):  # a client that does not read is cut off
                async with asyncio.timeout(GRACE_S):
                    await send({"type": "http.response.body", "body": last, "more_body": False})


class Generate:
    """Answers with the model's output. Nothing is sent before the first event."""

    def __init__(self, gateway: Gateway, opens: Open) -> None:
        self._gateway = gateway
        self._open = opens

    async def __call__(self, exchange: Exchange, request: ParsedRequest) -> None:
        form, request = self._open(exchange, request)
        left_s = exchange.lifetime.check()
        async with self._gateway.chat(exchange.request_id, request, exchange.caller, left_s) as answer:
            if request.stream:
                await _stream(exchange, form, answer)
            else:
                await exchange.answer(form.whole(*await answer.collect()), answer.ignored)


def _completing(gateway: Gateway, form: type[ChatForm] | type[CompletionForm]) -> Open:
    def opened(exchange: Exchange, request: ParsedRequest) -> tuple[Form, ParsedRequest]:
        made = form(
            exchange.request_id,
            request.model,
            gateway.created(),
            include_usage=request.include_usage,
            logprobs=request.sampling.logprobs is not None,
        )
        return made, request

    return opened


def _messages(exchange: Exchange, request: ParsedRequest) -> tuple[Form, ParsedRequest]:
    return MessagesForm(exchange.request_id, request.model), request


class Tokenize:
    """Answers with the prompt's token ids, or their number."""

    def __init__(
        self, gateway: Gateway, body: Callable[[Tokenized, ModelInfo, ParsedRequest], Mapping[str, object]]
    ) -> None:
        self._gateway = gateway
        self._body = body

    async def __call__(self, exchange: Exchange, request: ParsedRequest) -> None:
        left_s = exchange.lifetime.check()
        tokenized, model = await self._gateway.tokenize(exchange.request_id, request, exchange.caller, left_s)
        await exchange.answer(self._body(tokenized, model, request), request.ignored)


def _tokens(tokenized: Tokenized, model: ModelInfo, request: ParsedRequest) -> api.Tokens:
    return tokens_body(tokenized, model, return_token_strs=request.return_token_strs)


def _token_count(tokenized: Tokenized, _model: ModelInfo, _request: ParsedRequest) -> TokenCount:
    return {"input_tokens": len(tokenized.token_ids)}


async def _stream(exchange: Exchange, form: Form, answer: OpenAnswer) -> None:
    """Send server-sent events. A stream that fails ends with the form's error. Raises DeadlineExceeded instead of beginning after the deadline."""
    exchange.lifetime.check()
    headers = list(_STREAM_HEADERS)
    if answer.ignored:
        headers.append((request_fields.HEADER.encode(), request_fields.header_of(answer.ignored).encode()))
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
    exchange.streaming = form
    exchange.scope["state"][FILLER] = _COMMENT
    # Each write is a system call and wakes the client: events that arrive together are sent together.
    body = form.begin(answer.request.choices)
    async with aclosing(answer.events()) as stream:
        async for events in stream:
            body += b"".join(_encode_event(form, event) for event in events)
            last = bool(events) and isinstance(events[-1], ChatFinished)
            if body:
                await exchange.send({"type": "http.response.body", "body": body, "more_body": not last})
                body = b""
    exchange.streaming = None


def _encode_event(form: Form, event: ChatEvent) -> bytes:
    match event:
        case TokenChunk():
            return form.chunk(event)
        case ToolCallMade() | ToolArguments():
            return form.call(event)
        case Reasoned():
            return form.thought(event)
        case ChoiceFinished():
            return form.finish(event)
        case ChatFinished():
            return form.end(event.usage)
        case FieldsIgnored():
            return b""
