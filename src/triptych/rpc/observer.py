"""Observes every call of a server: duration or number of open streams by method and status, request id, trace."""

from collections.abc import Iterable

from prometheus_client import Counter, Gauge, Histogram

from triptych.rpc.context import REQUEST_ID, incoming
from triptych.runtime import logs, tracing
from triptych.runtime.clock import monotonic
from triptych.runtime.telemetry import Telemetry

_LASTING = ("/WatchLoad", "/Watch", "/Attend", "/Exchange")
"""Streams that last as long as their client: what counts is how many are open, and how they end."""
_HOUSEKEEPING = ("/Release", "/Describe")
"""Background calls, which do not belong in the trace of the request that triggered them."""
_ENTRY_POINTS = frozenset({"/triptych.v1.Router/Chat", "/triptych.v1.Router/Tokenize"})
"""Methods that start a trace without a parent; all others are traced only as part of one."""


class CallObserver:
    """``begin`` and ``Call.end`` enclose each call, in the call's own task."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._tracing = telemetry.tracing
        self._seconds = telemetry.metrics.histogram(
            "triptych_rpc_server_seconds", "Time from a call's arrival to its end", ("method", "code")
        )
        self._open = telemetry.metrics.gauge(
            "triptych_rpc_server_streams", "Open streams that last as long as their client", ("method",)
        )
        self._ended = telemetry.metrics.counter(
            "triptych_rpc_server_streams_ended", "Such streams that have ended, by status", ("method", "code")
        )
        self._methods: dict[str, _Timed | _Lasting] = {}

    def begin(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> "Call":
        """``method`` must be one of the server's, as it becomes a label."""
        carrier = incoming(metadata)
        logs.request_id.set(carrier.get(REQUEST_ID, ""))
        span: tracing.Span | None = None
        if self._tracing is not None and _is_traced(method, carrier):
            span = self._tracing.serve(method.rsplit(".", 1)[-1], carrier)
            tracing.enter(span)
        measured = self._methods.get(method) or self._measured(method)
        if isinstance(measured, _Lasting):
            measured.begin()
        return Call(measured, span)

    def _measured(self, method: str) -> "_Timed | _Lasting":
        name = method.rsplit(".", 1)[-1]
        lasts = method.endswith(_LASTING)
        measured = _Lasting(self._open.labels(name), self._ended, name) if lasts else _Timed(self._seconds, name)
        self._methods[method] = measured
        return measured


def _is_traced(method: str, carrier: dict[str, str]) -> bool:
    belongs = tracing.HEADERS[0] in carrier or method in _ENTRY_POINTS
    return belongs and not method.endswith(_LASTING + _HOUSEKEEPING)


class _Timed:
    """A method whose calls are timed."""

    def __init__(self, seconds: Histogram, name: str) -> None:
        self._seconds = seconds
        self._name = name
        self._by_code: dict[str, Histogram] = {}

    def end(self, code: str, seconds: float) -> None:
        child = self._by_code.get(code)
        if child is None:
            child = self._by_code[code] = self._seconds.labels(self._name, code)
        child.observe(seconds)


class _Lasting:
    """A method whose calls last as long as their client."""

    def __init__(self, open_: Gauge, ended: Counter, name: str) -> None:
        self._open = open_
        self._ended = ended
        self._name = name

    def begin(self) -> None:
        self._open.inc()

    def end(self, code: str, _: float) -> None:
        self._open.dec()
        self._ended.labels(self._name, code).inc()


class Call:
    """Running call. Its code stays CANCELLED unless another is set."""

    __slots__ = ("_began_s", "_measured", "_span", "code")

    def __init__(self, measured: _Timed | _Lasting, span: tracing.Span | None) -> None:
        self._measured = measured
        self._span = span
        self._began_s = monotonic()
        self.code = "CANCELLED"

    def end(self) -> None:
        self._measured.end(self.code, monotonic() - self._began_s)
        if self._span is not None:
            self._span.end("" if self.code == "OK" else self.code)
