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
    """What observes the calls of a server, by method."""

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

    def of(self, method: str) -> "ObservedMethod":
        """``method`` must be one of the server's, as it becomes a label."""
        if method.endswith(_LASTING):
            return _LastingMethod(method, self._tracing, self._seconds, self._open, self._ended)
        return ObservedMethod(method, self._tracing, self._seconds)


class ObservedMethod:
    """A method whose calls are timed: ``begin`` and ``end`` enclose each call, in the call's own task."""

    def __init__(self, method: str, traces: tracing.Tracing | None, seconds: Histogram) -> None:
        self.name = method.rsplit(".", 1)[-1]
        self._traces = None if method.endswith(_LASTING + _HOUSEKEEPING) else traces
        self._is_entry_point = method in _ENTRY_POINTS
        self._seconds = seconds
        self._by_code: dict[str, Histogram] = {}

    def begin(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> tracing.Span | None:
        """Returns the call's span, if it is traced."""
        carrier = incoming(metadata)
        logs.request_id.set(carrier.get(REQUEST_ID, ""))
        if self._traces is None or not (self._is_entry_point or tracing.HEADERS[0] in carrier):
            return None
        span = self._traces.serve(self.name, carrier)
        tracing.enter(span)
        return span

    def end(self, code: str, began_s: float, span: tracing.Span | None) -> None:
        """Note how a call ended that began at ``began_s`` on the monotonic clock."""
        child = self._by_code.get(code)
        if child is None:
            child = self._by_code[code] = self._seconds.labels(self.name, code)
        child.observe(monotonic() - began_s)
        if span is not None:
            span.end("" if code == "OK" else code)


class _LastingMethod(ObservedMethod):
    """A method whose calls last as long as their client: they are counted."""

    def __init__(
        self, method: str, traces: tracing.Tracing | None, seconds: Histogram, open_: Gauge, ended: Counter
    ) -> None:
        super().__init__(method, traces, seconds)
        self._open = open_
        self._ended = ended

    def begin(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> tracing.Span | None:
        self._open.labels(self.name).inc()
        return super().begin(metadata)

    def end(self, code: str, began_s: float, span: tracing.Span | None) -> None:
        del began_s, span
        self._open.labels(self.name).dec()
        self._ended.labels(self.name, code).inc()
