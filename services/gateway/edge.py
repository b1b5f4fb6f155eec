"""The outermost ASGI layer: sets ``x-request-id`` on every response and turns every error into one error response."""

import logging
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from http import HTTPStatus
from ipaddress import ip_address
from math import isfinite

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.errors import (
    Cancelled,
    ExpectationFailed,
    InternalError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    TriptychError,
    UnsupportedEncoding,
)
from triptych.ports import Clock
from triptych.runtime import logs

from .answers import error_body, error_headers
from .http import ARRIVED_S, REFUSAL
from .keys import Caller, KeyRing
from .messages_form import messages_error
from .request_ids import canonical
from .shedding import Shedding

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
TIMEOUT = "x-request-timeout"
_OPEN = frozenset({"/health", "/ping"})
"""Paths that need no key."""
_PROBES = frozenset({*_OPEN, "/ready", "/metrics", "/version", "/load"})
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


class Edge:
    """Wraps the whole application. Unknown exceptions are logged and answered with a bare 500.

    ``hosts`` are the allowed values of the ``Host`` header, or None for any. This stops DNS rebinding, in which a web
    page's own name is made to resolve to a loopback address. Then web pages of other sites, but for the ``origins``, may not post forms either,
    which browsers send without asking (CORS). ``refused`` tells why no connection may stay open, ``shed`` why a request is
    refused as the gateway is behind. Neither applies to the probes of an operator.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        new_id: Callable[[], str],
        taken: Callable[[str], bool],
        refused: Callable[[], TriptychError | None],
        shed: Callable[[Headers], TriptychError | None],
        hosts: frozenset[str] | None,
        origins: Collection[str],
        clock: Clock,
    ) -> None:
        self._app = app
        self._refused = refused
        self._shed = shed
        self._hosts = hosts
        self._origins = origins
        self._new_id = new_id
        self._taken = taken
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = self._clock()
        headers = Headers(scope=scope)
        request_id = self._request_id(headers)
        own_id = canonical(request_id)
        is_probe = scope["path"] in _PROBES
        state = scope.setdefault("state", {})
        state.update(request_id=own_id, headers=headers)
        state.setdefault(ARRIVED_S, began_s)
        scope["app"] = self  # without it Starlette's router answers unknown routes itself
        logs.request_id.set(own_id)
        status = 0
        level = logging.DEBUG if is_probe else logging.INFO

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                sent[REQUEST_ID] = request_id
                caller: Caller | None = scope["state"].get("caller")
                for name, value in caller.headers() if caller is not None else ():
                    sent[name] = value
            await send(message)

        try:
            refusal = scope["state"].get(REFUSAL)
            if refusal is None and not is_probe:
                refusal = self._refused()
            if refusal is not None:
                await error_response(refusal, {"connection": "close"}, path=scope["path"])(scope, receive, send_with_id)
                return
            if not is_probe and (refusal := self._shed(headers)) is not None:
                level = logging.DEBUG  # a line for each would cost more than the rest
                await error_response(refusal, path=scope["path"])(scope, receive, send_with_id)
                return
            self._check_headers(scope["method"], headers)
            await self._app(scope, receive, send_with_id)
        except HTTPException as error:
            await _no_route(error, scope)(scope, receive, send_with_id)
        except Exception as error:
            known = as_known(error, request_id)
            if status:  # the response has begun and cannot change: uvicorn cuts the connection
                raise
            await error_response(known, path=scope["path"])(scope, receive, send_with_id)
        finally:
            took_s = self._clock() - began_s
            logger.log(level, "%s %r %d %.3fs", scope["method"], scope["path"][:200], status, took_s)

    def _check_headers(self, method: str, headers: Headers) -> None:
        """Raises PermissionDenied or ExpectationFailed."""
        if self._hosts is not None:
            for host in headers.getlist("host"):
                name = host_name(host)
                if name not in self._hosts and not _is_loopback(name):
                    raise PermissionDenied(f"the host {host[:100]!r} is not allowed; --allowed-hosts adds hosts")
            origin = headers.get("origin", "")
            is_foreign = headers.get("sec-fetch-site") == "cross-site" and not {"*", origin} & set(self._origins)
            if method == "POST" and is_foreign:
                raise PermissionDenied(f"the origin {origin[:100]!r} is not allowed; --allowed-origins adds origins")
        expected = headers.get("expect")
        if expected is not None and expected.lower() != "100-continue":
            raise ExpectationFailed(f"Expect: {expected[:100]!r} is not supported")

    def _request_id(self, headers: Headers) -> str:
        """The client's own id if it is well formed and not in use by a running request; else a new one."""
        given = headers.get(REQUEST_ID, "")
        if _VALID_ID.fullmatch(given) and canonical(given) and not self._taken(canonical(given)):
            return given
        return self._new_id()


class AuthMiddleware:
    """Authenticates every request, ``/health`` and ``/ping`` excepted, if keys are configured, and counts those that are not shed."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, shedding: Shedding) -> None:
        self._app = app
        self._keys = keys
        self._shedding = shedding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            source = scope["client"][0] if scope.get("client") else ""
            caller = self._keys.caller(authorizations(scope["state"]["headers"]), source)
            scope["state"]["caller"] = caller
            if scope["path"] not in _PROBES:
                self._shedding.admit(caller.tenant)
        await self._app(scope, receive, send)


def authorizations(headers: Headers) -> list[str]:
    """The Authorization headers; without any, keys in ``x-api-key``, as Anthropic's clients send them."""
    return headers.getlist("authorization") or [f"Bearer {key}" for key in headers.getlist("x-api-key")]


def as_known(error: Exception, request_id: str) -> TriptychError:
    """An error of the tree unchanged; anything else is logged and becomes an InternalError without details."""
    if isinstance(error, TriptychError):
        return error
    logger.error("request %s failed", request_id, exc_info=error)
    return InternalError(f"internal error; the server's log has the details under {request_id}")


def _no_route(error: HTTPException, scope: Scope) -> JSONResponse:
    """The router's 404 and 405, with the JSON body of all errors."""
    path = scope["path"][:200]
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(NotFound(f"there is nothing at {path!r}"), path=path)
    known = InvalidRequest(f"{scope['method'][:20]} is not allowed at {path!r}")
    return JSONResponse(_body(known, path), error.status_code, error.headers)


def error_response(error: TriptychError, headers: Mapping[str, str] | None = None, *, path: str = "") -> JSONResponse:
    """The error in the form of the API that the path belongs to."""
    return JSONResponse(_body(error, path), error.http_status, {**error_headers(error), **(headers or {})})


def _body(error: TriptychError, path: str) -> Mapping[str, object]:
    return messages_error(error) if path.startswith("/v1/messages") else error_body(error)


def host_name(host: str) -> str:
    """A ``Host`` header without its port and the root's dot: a name, an IPv4 address, or an IPv6 address in brackets."""
    end = host.find("]") + 1
    return (host[:end] if end else host.partition(":")[0].removesuffix(".")).lower()


def _is_loopback(host: str) -> bool:
    """Whether a host's name is a loopback address: no name can be made to resolve to it."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def check_encoding(headers: Headers) -> None:
    """Raises UnsupportedEncoding."""
    for name, plain in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
        for encoding in headers.getlist(name):
            if encoding.lower() != plain:
                raise UnsupportedEncoding(
                    f"{name}: {encoding[:100]!r} is not supported; send the body uncompressed", param=name
                )


async def body_chunks(scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
    """A request's body as it arrives.

    Raises Cancelled when the client leaves before the end, or the connection's refusal.
    """
    while True:
        message = await receive()
        if (refusal := scope["state"].get(REFUSAL)) is not None:
            raise refusal
        if message["type"] == "http.disconnect":
            raise Cancelled("the client closed the connection before its request was complete")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def disconnected(receive: Receive) -> None:
    """Return once the client has left. Call it only after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def announced_bytes(headers: Headers) -> int | None:
    value = headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None


def timeout_s(headers: Headers, default_s: float, limit_s: float) -> float:
    """The value of ``x-request-timeout`` in seconds. Raises InvalidRequest."""
    given = headers.get(TIMEOUT)
    if given is None:
        return default_s
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not isfinite(value) or not 0 < value <= limit_s:
        raise InvalidRequest(
            f"{TIMEOUT} must be above 0 and at most {limit_s:g} seconds, got {given[:40]!r}", param=TIMEOUT
        )
    return value
