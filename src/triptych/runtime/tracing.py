"""Optional tracing of a request across processes (OpenTelemetry, W3C trace context).

Without the extra ``telemetry`` or an endpoint no span is created: ``current()`` is None, which is the whole cost. A
task's context holds its current span, and the tasks it starts inherit it.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import time_ns
from typing import TYPE_CHECKING

from triptych.errors import TriptychError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanKind, Tracer

HEADERS = ("traceparent", "tracestate")
"""HTTP headers and gRPC metadata keys that carry the trace context."""

Attributes = Mapping[str, str | int | float | bool]
_NS_PER_S = 1_000_000_000


class TracingUnavailable(Exception):
    """Tracing is configured but its packages are not installed."""


class Span:
    """A running span. Its methods are cheap and do not raise."""

    def __init__(self, tracer: "Tracer", span: "OtelSpan") -> None:
        self._tracer = tracer
        self._span = span
        self._headers: dict[str, str] = {}

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def headers(self) -> Mapping[str, str]:
        """Headers that make the next process's spans children of this one."""
        if not self._headers:
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            TraceContextTextMapPropagator().inject(self._headers, self._context())
        return self._headers

    def child(self, name: str) -> "Span":
        return Span(self._tracer, self._tracer.start_span(name, context=self._context()))

    def stages(self, durations_s: Mapping[str, float], attributes: Mapping[str, Attributes] | None = None) -> None:
        """Record consecutive child spans, the last one ending now."""
        start_ns = time_ns() - int(sum(durations_s.values()) * _NS_PER_S)
        for name, duration_s in durations_s.items():
            end_ns = start_ns + int(duration_s * _NS_PER_S)
            of_stage = dict((attributes or {}).get(name, {}))
            stage = self._tracer.start_span(name, context=self._context(), attributes=of_stage, start_time=start_ns)
            stage.end(end_ns)
            start_ns = end_ns

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, error: str = "") -> None:
        """``error`` is a code of the error tree or of gRPC, never a message."""
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def _context(self) -> "Context":
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span)


class _NotSampled(Span):
    """A span of a trace that is not recorded: it hands the trace's id and that decision on, at next to no cost."""

    def child(self, name: str) -> "Span":
        del name
        return self

    def stages(self, durations_s: Mapping[str, float], attributes: Mapping[str, Attributes] | None = None) -> None:
        del durations_s, attributes

    def note(self, attributes: Attributes) -> None:
        del attributes

    def end(self, error: str = "") -> None:
        del error


_current: ContextVar[Span | None] = ContextVar("span", default=None)


current: Callable[[], Span | None] = _current.get
"""The current span, if any, recorded or not."""


def recording() -> Span | None:
    """The current span if it is recorded, for those who would work to describe it."""
    span = _current.get()
    return None if isinstance(span, _NotSampled) else span


@contextmanager
def use(span: Span) -> Generator[Span]:
    """Make ``span`` current in the body, and end it afterwards with the code of the exception, if any."""
    before = _current.get()
    _current.set(span)
    error = ""
    try:
        yield span
    except TriptychError as raised:
        error = raised.code
        raise
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        _current.set(before)
        span.end(error)


def enter(span: Span) -> None:
    """Make ``span`` current for the rest of this task; its owner ends it."""
    _current.set(span)


@contextmanager
def child(name: str) -> Generator[Span | None]:
    """A child of the current span, if there is one."""
    parent = _current.get()
    if parent is None:
        yield None
        return
    with use(parent.child(name)) as span:
        yield span


class Tracing:
    """Creates the root span of each request in a process."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("triptych")

    @classmethod
    def exporting(cls, service: str, endpoint: str, sampling: float) -> "Tracing":
        """Export to an OTLP collector over gRPC (``http://host:4317``), see ``sampler``. Raises TracingUnavailable."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise TracingUnavailable(
                "otlp_endpoint is set, but Triptych's extra 'telemetry' is not installed"
            ) from None
        provider = TracerProvider(
            resource=Resource.create({"service.name": f"triptych-{service}"}), sampler=sampler(sampling)
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def serve(self, name: str, carrier: Mapping[str, str]) -> Span:
        """The span of an incoming call, a child of the caller's if ``carrier`` (HEADERS) names one."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(carrier))
        span = self._tracer.start_span(name, context=parent, kind=_server_kind())
        return (Span if span.is_recording() else _NotSampled)(self._tracer, span)

    def close(self) -> None:
        """Export pending spans; blocks for a few seconds at most."""
        self._provider.shutdown()


def sampler(share: float) -> "Sampler":
    """Records this share of the traces that begin here; of the others what their caller has decided."""
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    return ParentBasedTraceIdRatio(share)


def _server_kind() -> "SpanKind":
    from opentelemetry.trace import SpanKind

    return SpanKind.SERVER
