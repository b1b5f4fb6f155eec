"""Sampling: the process where a trace begins decides, others follow, and what is not recorded is still handed on."""

from collections.abc import Mapping

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from triptych.runtime import tracing
from triptych.runtime.settings import ServiceSettings
from triptych.runtime.tracing import Tracing

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


class Process:
    """A process that records a share of the traces that begin in it."""

    def __init__(self, share: float) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=tracing.sampler(share))
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    @property
    def recorded(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]

    def serves(self, carrier: Mapping[str, str]) -> Mapping[str, str]:
        """Serve a call with a child of its span. Returns the headers of a call that this makes."""
        span = self.tracing.serve("call", carrier)
        with tracing.use(span), tracing.child("work") as work:
            assert work is not None
            work.note({"items": 1})
            work.stages({"queue": 0.1})
            return work.headers()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_process_where_a_trace_begins_decides_for_all(share: float) -> None:
    first, second = Process(share), Process(1 - share)
    headers = first.serves({})
    second.serves(headers)
    spans = ["queue", "work", "call"] if share else []
    assert first.recorded == second.recorded == spans


@pytest.mark.parametrize(("flags", "recorded"), [("01", True), ("00", False)])
def test_a_callers_decision_is_followed_and_its_trace_goes_on(flags: str, recorded: bool) -> None:
    process = Process(0.5)
    headers = process.serves({"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-{flags}"})
    assert bool(process.recorded) == recorded
    version, trace_id, _, its_flags = headers["traceparent"].split("-")
    assert (version, trace_id, its_flags) == ("00", TRACE_ID, flags)


def test_a_share_of_the_traces_is_recorded() -> None:
    process = Process(0.1)
    for _ in range(2000):
        process.serves({})
    assert 100 < process.recorded.count("call") < 300


def test_what_is_not_recorded_need_not_be_described() -> None:
    span = Process(0.0).tracing.serve("call", {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-00"})
    with tracing.use(span):
        assert tracing.recording() is None
        current = tracing.current()
        assert current is not None
        assert current.trace_id == TRACE_ID, "log lines have it"
    with tracing.use(Process(1.0).tracing.serve("call", {})) as span:
        assert tracing.recording() is span


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ValueError, match="trace_sampling"):
        ServiceSettings(trace_sampling=share)
