"""Every call that a server answers: counted by method and status, and under the caller's request and trace."""

from collections.abc import Iterable

from prometheus_client import Histogram

from triptych.rpc.context import REQUEST_ID, incoming
from triptych.runtime import logs, tracing
from triptych.runtime.clock import monotonic
from triptych.runtime.telemetry import Telemetry

_WATCHES = ("/WatchLoad", "/Watch")
"""Streams that last as long as their client: neither their time nor a trace of them means anything."""
_HOUSEKEEPING = ("/Release", "/Describe")
"""Calls in the background, of which a trace of the request that happened to set them off has no use."""
_ENTRANCES = frozenset({"/triptych.v1.Router/Chat", "/triptych.v1.Router/Tokenize"})
"""Where a trace begins when the caller has none; everywhere else a call is traced only as part of one."""


class CallObserver:
    """``begin`` and ``Call.end`` go around each call, in the call's own task."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._tracing = telemetry.tracing
        self._seconds = telemetry.metrics.histogram(
            "triptych_rpc_server_seconds", "Time from a call's arrival to its end", ("method", "code")
        )
        self._children: dict[tuple[str, str], Histogram] = {}

    def begin(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> "Call":
        """``method`` is one that the server has: its name is a label."""
        carrier = incoming(metadata)
        logs.request_id.set(carrier.get(REQUEST_ID, ""))
        span: tracing.Span | None = None
        if self._tracing is not None and _is_traced(method, carrier):
            span = self._tracing.serve(method.rsplit(".", 1)[-1], carrier)
            tracing.enter(span)
        return Call(self, method, span)

    def observe(self, method: str, code: str, seconds: float) -> None:
        if method.endswith(_WATCHES):
            return
        child = self._children.get((method, code))
        if child is None:
            child = self._children[method, code] = self._seconds.labels(method.rsplit(".", 1)[-1], code)
        child.observe(seconds)


def _is_traced(method: str, carrier: dict[str, str]) -> bool:
    belongs = tracing.HEADERS[0] in carrier or method in _ENTRANCES
    return belongs and not method.endswith(_WATCHES + _HOUSEKEEPING)


class Call:
    """One call under way; it counts as cancelled unless somebody says how else it ended."""

    __slots__ = ("_began_s", "_method", "_observer", "_span", "code")

    def __init__(self, observer: CallObserver, method: str, span: tracing.Span | None) -> None:
        self._observer = observer
        self._method = method
        self._span = span
        self._began_s = monotonic()
        self.code = "CANCELLED"

    def end(self) -> None:
        self._observer.observe(self._method, self.code, monotonic() - self._began_s)
        if self._span is not None:
            self._span.end("" if self.code == "OK" else self.code)
