"""The routes, and the one endpoint that streams."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import aclosing

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from triptych.domain.generation import ChatFinished, ChoiceFinished, TokenChunk
from triptych.errors import InvalidRequest, NotFound, TriptychError
from triptych.ports import Clock

from . import edge
from .answers import Chunks, completion, error_body, model_body, timeline_body
from .scope import RequestScope
from .service import Gateway, OpenChat

_GRACE_S = 0.5
"""The router keeps the time limit; the gateway only sees to it that nothing outlives it."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def create_app(
    gateway: Gateway, *, clock: Clock, new_id: Callable[[], str] = lambda: secrets.token_hex(16)
) -> Starlette:
    """The ASGI application. ``new_id`` names requests whose client did not."""
    endpoints = Endpoints(gateway)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", ChatCompletions(gateway), methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{model_id:path}", endpoints.model),
            Route("/v1/requests/{request_id}/timeline", endpoints.timeline),
            Route("/health", endpoints.health),
            Route("/ready", endpoints.ready),
        ],
        middleware=[Middleware(edge.Edge, new_id=new_id, taken=gateway.admission.is_running, clock=clock)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the routing itself, in the body of all errors."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        return edge.error_response(NotFound(f"there is nothing at {request.url.path[:200]!r}"))
    known = InvalidRequest(f"{request.method[:20]} is not possible at {request.url.path[:200]!r}")
    return JSONResponse(error_body(known), error.status_code, error.headers)


class Endpoints:
    """Everything that answers at once."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, _: Request) -> Response:
        """Alive: depends on nothing but this process."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """200 when every stage of a model has an instance, else 503 with what is missing."""
        readiness = await self._gateway.readiness()
        body = {"ready": readiness.ready, "missing": readiness.missing, "instances": readiness.instances}
        return JSONResponse(body, 200 if readiness.ready else 503)

    async def models(self, _: Request) -> Response:
        models, since = await self._gateway.models()
        return JSONResponse({"object": "list", "data": [model_body(model, since) for model in models]})

    async def model(self, request: Request) -> Response:
        model, since = await self._gateway.model(request.path_params["model_id"])
        return JSONResponse(model_body(model, since))

    async def timeline(self, request: Request) -> Response:
        return JSONResponse(timeline_body(await self._gateway.timeline(request.path_params["request_id"])))


class ChatCompletions:
    """``POST /v1/chat/completions`` as an ASGI application: nothing is sent before the first good event."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id: str = scope["state"]["request_id"]
        headers = Headers(scope=scope)
        settings = self._gateway.settings
        timeout_s = edge.timeout_s(headers, settings.request_timeout_s, settings.max_request_timeout_s)
        answer = Answer(request_id, self._gateway.created(), scope, receive, send)
        life = RequestScope(timeout_s + _GRACE_S)
        try:
            with self._gateway.admission.request(request_id, life) as hold:
                async with life.running():
                    chunks = edge.body_chunks(receive)
                    body = await self._gateway.read_body(chunks, edge.announced_bytes(headers), hold)
                    async with life.ended_by(lambda: edge.disconnected(receive)):
                        request = await self._gateway.parse(body)
                        del body
                        async with self._gateway.chat(request_id, request, life.left_s - _GRACE_S) as chat:
                            await answer.send(chat)
        except Exception as error:
            if not answer.streaming:
                raise
            async with asyncio.timeout(_GRACE_S):  # a client that does not read is cut off instead
                await answer.break_off(edge.as_known(error, request_id))


class Answer:
    """One answer on its way: whole, or as a stream that may break off with an error as its last event."""

    def __init__(self, request_id: str, created: int, scope: Scope, receive: Receive, send: Send) -> None:
        self._request_id = request_id
        self._created = created
        self._asgi = (scope, receive, send)
        self._send = send
        self.streaming = False

    async def send(self, chat: OpenChat) -> None:
        if chat.request.stream:
            await self._stream(chat)
            return
        whole = await chat.collect()
        body = completion(self._request_id, chat.request.model, self._created, whole.text, whole.reason, whole.usage)
        await JSONResponse(body)(*self._asgi)

    async def break_off(self, error: TriptychError) -> None:
        """The 200 is out: say what happened in the stream, and end it without [DONE]."""
        await self._write(Chunks.error(error), last=True)

    async def _stream(self, chat: OpenChat) -> None:
        include_usage = chat.request.include_usage
        chunks = Chunks(self._request_id, chat.request.model, self._created, include_usage=include_usage)
        self.streaming = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        await self._write(chunks.role())
        async with aclosing(chat.events()) as events:
            async for event in events:
                match event:
                    case TokenChunk(text=""):
                        pass  # a character or a stop string is still incomplete
                    case TokenChunk(text=text):
                        await self._write(chunks.text(text))
                    case ChoiceFinished(reason=reason):
                        await self._write(chunks.finish(reason))
                    case ChatFinished(usage=usage) if include_usage:
                        await self._write(chunks.usage(usage))
        await self._write(Chunks.DONE, last=True)
        self.streaming = False

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
