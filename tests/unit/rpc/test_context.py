"""Metadata of calls: request id and trace context, short and well formed."""

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider

from triptych.rpc.context import REQUEST_ID, incoming, outgoing
from triptych.rpc.observer import CallObserver
from triptych.runtime import logs, tracing
from triptych.runtime.clock import monotonic
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tracing import Tracing

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def in_separate_task(work: object) -> object:
    return await asyncio.create_task(work)  # type: ignore[arg-type]  # noqa: TID251 - each call has its own context


def test_without_request_and_trace_nothing_is_sent() -> None:
    assert outgoing() == ()


@pytest.mark.parametrize("bad", ["", "x" * 129, "new\nline", "ü"])
def test_malformed_request_ids_are_neither_sent_nor_accepted(bad: str) -> None:
    assert outgoing(bad) == ()
    assert incoming([(REQUEST_ID, bad), ("other", "x")]) == {}


def test_binary_metadata_is_not_a_request_id() -> None:
    assert incoming([(REQUEST_ID, b"r")]) == {}


async def test_a_call_propagates_the_request_id_and_trace_of_its_caller() -> None:
    telemetry = Telemetry(tracing=Tracing(TracerProvider()))
    observed = CallObserver(telemetry).of("/triptych.v1.Encoder/Encode")

    async def call() -> dict[str, str]:
        began_s = monotonic()
        span = observed.begin([(REQUEST_ID, "r-1"), ("traceparent", TRACEPARENT)])
        handed_on = dict(outgoing())
        observed.end("OK", began_s, span)
        return handed_on

    handed_on = await in_separate_task(call())
    assert isinstance(handed_on, dict)
    assert handed_on[REQUEST_ID] == "r-1"
    version, trace_id, span_id, flags = handed_on["traceparent"].split("-")
    assert (version, trace_id, flags) == tuple(TRACEPARENT.split("-")[i] for i in (0, 1, 3))
    assert span_id != TRACEPARENT.split("-")[2]
    assert logs.request_id.get() == ""
    assert tracing.current() is None
    text = telemetry.metrics.render().decode()
    assert 'triptych_rpc_server_seconds_count{code="OK",method="Encoder/Encode"} 1.0' in text


async def test_background_calls_and_watches_start_no_trace() -> None:
    observer = CallObserver(Telemetry(tracing=Tracing(TracerProvider())))

    async def span_of(method: str, *metadata: tuple[str, str]) -> tracing.Span | None:
        observer.of(method).begin(metadata)
        return tracing.current()

    traced = {
        method: await in_separate_task(span_of(method)) is not None
        for method in ("/triptych.v1.Router/Chat", "/triptych.v1.Router/Readiness", "/grpc.health.v1.Health/Check")
    }
    assert traced == dict.fromkeys(traced, False) | {"/triptych.v1.Router/Chat": True}
    for method in ("/triptych.v1.Encoder/Release", "/triptych.v1.Text/WatchLoad"):
        assert await in_separate_task(span_of(method, ("traceparent", TRACEPARENT))) is None


def test_streams_that_last_are_counted_and_not_timed() -> None:
    telemetry = Telemetry()
    observer = CallObserver(telemetry)
    encode, attend, watch = (
        observer.of(f"/triptych.v1.{name}") for name in ("Encoder/Encode", "PoolManager/Attend", "PoolManager/Watch")
    )
    for method in (encode, attend, attend, watch):
        method.begin(())
    encode.end("CANCELLED", 0.0, None)
    attend.end("UNAVAILABLE", 0.0, None)
    rendered = telemetry.metrics.render().decode()
    assert 'triptych_rpc_server_streams{method="PoolManager/Attend"} 1.0' in rendered
    assert 'triptych_rpc_server_streams{method="PoolManager/Watch"} 1.0' in rendered
    ended = 'triptych_rpc_server_streams_ended_total{code="UNAVAILABLE",method="PoolManager/Attend"} 1.0'
    assert ended in rendered
    timed = {line for line in rendered.splitlines() if line.startswith("triptych_rpc_server_seconds_count")}
    assert timed == {'triptych_rpc_server_seconds_count{code="CANCELLED",method="Encoder/Encode"} 1.0'}
