"""HTTP metrics and tracing around the whole application."""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import Histogram
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.ports import Clock
from triptych.runtime import logs, tracing
from triptych.runtime.metrics import CONTENT_TYPE, Metrics, gauge, total
from triptych.runtime.telemetry import Telemetry

_ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/openapi.json",
        "/health",
        "/ping",
        "/version",
        "/load",
        "/ready",
        "/metrics",
    }
)
"""Paths that may be label values; any other path is one of the prefixes below, or ``other``."""
_PREFIXES = ("/v1/models/", "/v1/requests/", "/v1/responses/")
_TRACED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})


class Observed:
    """ASGI middleware around all others: makes the path plain, records duration and status, and starts the trace span."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry, clock: Clock) -> None:
        self._app = app
        self._tracing = telemetry.tracing
        self._clock = clock
        self._seconds = telemetry.metrics.histogram(
            "triptych_http_seconds", "Time from a request's head to the end of its answer", ("route", "status")
        )
        self._children: dict[tuple[str, int], Histogram] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = plain_path(scope["path"])
        route, began_s, status = route_of(scope["path"]), self._clock(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        logs.request_id.set("")  # the next request of a connection may run in the previous one's context
        span = None if self._tracing is None else self._span(self._tracing, route, scope)
        try:
            await self._app(scope, receive, counted)
        finally:
            self._observe(route, status, self._clock() - began_s)
            if span is not None:
                span.note({"http.route": route, "http.response.status_code": status})
                span.end("" if 0 < status < 500 else str(status))

    def _span(self, traces: tracing.Tracing, route: str, scope: Scope) -> tracing.Span | None:
        if route not in _TRACED:
            return None
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name.decode("latin-1") in tracing.HEADERS
        }
        span = traces.serve(f"{scope['method']} {route}", carrier)
        tracing.enter(span)
        return span

    def _observe(self, route: str, status: int, seconds: float) -> None:
        child = self._children.get((route, status))
        if child is None:
            child = self._children[route, status] = self._seconds.labels(route, str(status))
        child.observe(seconds)


def plain_path(path: str) -> str:
    """The path by which a route is found: clients that join URLs put a slash at the end, or several where one belongs."""
    return "/" + "/".join(filter(None, path.split("/")))


def route_of(path: str) -> str:
    """The route of a plain path as a metric label, with few values whatever clients request."""
    if path in _ROUTES:
        return path
    return next((f"{prefix}..." for prefix in _PREFIXES if path.startswith(prefix)), "other")


class MetricsEndpoint:
    """``GET /metrics``: the same as on the process's admin port."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def __call__(self, request: Request) -> Response:
        del request
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})


class Admitted(Protocol):
    """Requests and bytes that the gateway holds at the moment."""

    @property
    def requests(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Shed(Protocol):
    """Requests that the gateway has refused by itself."""

    @property
    def count(self) -> int: ...


def watch(metrics: Metrics, admitted: Admitted, shed: Shed) -> None:
    """Read both at every scrape."""

    def read() -> Iterable[Metric]:
        yield gauge("triptych_http_requests_running", "Requests that are being answered", admitted.requests)
        yield gauge("triptych_http_body_bytes", "Bytes of their bodies", admitted.nbytes)
        yield total(
            "triptych_http_requests_shed",
            "Requests refused unread, as the gateway is behind or the router refuses",
            {(): shed.count},
        )

    metrics.watch(read)
