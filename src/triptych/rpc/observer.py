"""Observes every call of a server: duration by method and status, request id, trace."""

from collections.abc import Iterable

from prometheus_client import Histogram

from triptych.rpc.context import REQUEST_ID, incoming
from triptych.runtime import logs, tracing
from triptych.runtime.clock import monotonic
from triptych.runtime.telemetry import Telemetry

_WATCHES = ("/WatchLoad", "/Watch")
"""Streams that last as long as their client, so that duration and trace mean nothing."""
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
        self.durations: dict[tuple[str, str], Histogram | None] = {}
        """By method and code; None for methods whose duration means nothing."""

    def begin(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> "Call":
        """``method`` must be one of the server's, as it becomes a label."""
        carrier = incoming(metadata)
        logs.request_id.set(carrier.get(REQUEST_ID, ""))
        span: tracing.Span | None = None
        if self._tracing is not None and _is_traced(method, carrier):
            span = self._tracing.serve(method.rsplit(".", 1)[-1], carrier)
            tracing.enter(span)
        return Call(self, method, span)

    def duration(self, method: str, code: str) -> Histogram | None:
        """Add to ``durations``."""
        watches = method.endswith(_WATCHES)
        made = None if watches else self._seconds.labels(method.rsplit(".", 1)[-1], code)
        self.durations[method, code] = made
        return made


def _is_traced(method: str, carrier: dict[str, str]) -> bool:
    belongs = tracing.HEADERS[0] in carrier or method in _ENTRY_POINTS
    return belongs and not method.endswith(_WATCHES + _HOUSEKEEPING)


class Call:
    """One running call. Its code stays CANCELLED unless another is set."""

    __slots__ = ("_began_s", "_method", "_observer", "_span", "code")

    def __init__(self, observer: CallObserver, method: str, span: tracing.Span | None) -> None:
        self._observer = observer
        self._method = method
        self._span = span
        self._began_s = monotonic()
        self.code = "CANCELLED"

    def end(self) -> None:
        observer, key = self._observer, (self._method, self.code)
        duration = observer.durations[key] if key in observer.durations else observer.duration(*key)
        if duration is not None:
            duration.observe(monotonic() - self._began_s)
        if self._span is not None:
            self._span.end("" if self.code == "OK" else self.code)
