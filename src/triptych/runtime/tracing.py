"""Spans of a request as it goes from process to process (OpenTelemetry, W3C trace context), when that is configured.

Without the extra ``telemetry`` or without an endpoint nothing here is ever made: ``current()`` is None, which is all
that it costs. A span hangs in the context of its task, and tasks started on its behalf inherit it.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import time_ns
from typing import TYPE_CHECKING

from triptych.errors import TriptychError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanKind, Tracer

HEADERS = ("traceparent", "tracestate")
"""What carries a trace from one process to the next, in HTTP headers and gRPC metadata alike."""

Attributes = Mapping[str, str | int | float | bool]
_NS_PER_S = 1_000_000_000


class TracingUnavailable(Exception):
    """Traces are asked for, but what makes them is not installed."""


class Span:
    """One span under way. Every method is cheap and none fails."""

    def __init__(self, tracer: "Tracer", span: "OtelSpan") -> None:
        self._tracer = tracer
        self._span = span

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def headers(self) -> dict[str, str]:
        """What the next process needs to hang its spans below this one."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._context())
        return carrier

    def child(self, name: str) -> "Span":
        return Span(self._tracer, self._tracer.start_span(name, context=self._context()))

    def stages(self, durations_s: Mapping[str, float], attributes: Mapping[str, Attributes] | None = None) -> None:
        """Children that followed each other without a gap, the last one ending now."""
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
        """``error`` is a code of the error tree or of gRPC; messages stay where they are."""
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def _context(self) -> "Context":
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span)


_current: ContextVar[Span | None] = ContextVar("span", default=None)


def current() -> Span | None:
    """The span that runs now, if there is one."""
    return _current.get()


@contextmanager
def use(span: Span) -> Generator[Span]:
    """``span`` is current while the body runs, and ended after it, with the code of what was raised."""
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
    """``span`` is current for the rest of this task: whoever owns it ends it."""
    _current.set(span)


@contextmanager
def child(name: str) -> Generator[Span | None]:
    """A span below the current one, where there is one."""
    parent = _current.get()
    if parent is None:
        yield None
        return
    with use(parent.child(name)) as span:
        yield span


class Tracing:
    """Makes the first span of a process; the others hang below it."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("triptych")

    @classmethod
    def exporting(cls, service: str, endpoint: str) -> "Tracing":
        """To an OTLP collector over gRPC (``http://host:4317``). Raises TracingUnavailable."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise TracingUnavailable("otlp_endpoint is set, but triptych[telemetry] is not installed") from None
        provider = TracerProvider(resource=Resource.create({"service.name": f"triptych-{service}"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def serve(self, name: str, carrier: Mapping[str, str]) -> Span:
        """The span of a call that came in; below its caller's where ``carrier`` (HEADERS) names one."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(carrier))
        return Span(self._tracer, self._tracer.start_span(name, context=parent, kind=_server_kind()))

    def close(self) -> None:
        """Send what was not sent yet; blocks for at most a few seconds."""
        self._provider.shutdown()


def _server_kind() -> "SpanKind":
    from opentelemetry.trace import SpanKind

    return SpanKind.SERVER
