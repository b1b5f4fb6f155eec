"""One request through gateway, router, encoders and text instance in one process makes one tree of spans."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext

from tests.e2e.reference import Question
from triptych import demo
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tracing import Tracing
from triptych.services.encoder.app import app as encoder_app
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.gateway.app import app as gateway_app
from triptych.services.gateway.settings import GatewaySettings
from triptych.services.router.app import app as router_app
from triptych.services.router.settings import RouterSettings
from triptych.services.text.app import app as text_app
from triptych.services.text.settings import TextSettings
from triptych.transport.options import TransferOptions

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN_ID = "b7ad6b7169203331"


@asynccontextmanager
async def everything(telemetry: Telemetry) -> AsyncIterator[str]:
    """All four services on this event loop. Yields the gateway's URL once the router has seen all instances."""
    model = {"model": demo.MODEL_DIR, "model_id": demo.MODEL_ID, "transfers": TransferOptions(("tcp",)), "port": 0}
    async with AsyncExitStack() as stack:
        encoder = await stack.enter_async_context(encoder_app(EncoderSettings(**model), telemetry))  # type: ignore[arg-type]
        encoders = (f"127.0.0.1:{encoder.port}",)
        # Each process has its own registry; here only the spans are shared.
        text = await stack.enter_async_context(
            text_app(TextSettings(**model), Telemetry(tracing=telemetry.tracing))  # type: ignore[arg-type]
        )
        routing = RouterSettings(model=demo.MODEL_DIR, instances=(*encoders, f"127.0.0.1:{text.port}"), port=0)
        router = await stack.enter_async_context(router_app(routing, Telemetry(tracing=telemetry.tracing)))
        gateway = await stack.enter_async_context(
            gateway_app(
                GatewaySettings(router=(f"127.0.0.1:{router.port}",), port=0), Telemetry(tracing=telemetry.tracing)
            )
        )
        yield f"http://127.0.0.1:{gateway.port}"


def tree_of(spans: tuple[ReadableSpan, ...], parent_id: int) -> list[tuple[str, object]]:
    """(name, children) of the spans below ``parent_id``, in order of their start."""
    below = [span for span in spans if span.parent is not None and span.parent.span_id == parent_id]
    below.sort(key=lambda span: span.start_time or 0)
    return [(span.name, tree_of(spans, context_of(span).span_id)) for span in below]


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


async def test_a_request_makes_one_tree_from_the_callers_span_to_decode() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    question = Question("What digits are shown?", ("0_a", "1_a"))
    async with (
        everything(Telemetry(tracing=Tracing(provider))) as url,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        for _ in range(100):
            if (await client.get(f"{url}/ready")).status_code == 200:
                break
        answer = await client.post(
            f"{url}/v1/chat/completions",
            json=question.body(),
            headers={"traceparent": f"00-{TRACE_ID}-{CALLER_SPAN_ID}-01"},
        )
        assert answer.status_code == 200, answer.text
    spans = exporter.get_finished_spans()
    assert {format(context_of(span).trace_id, "032x") for span in spans} == {TRACE_ID}

    encode: tuple[str, object] = ("Encoder/Encode", [("queue", []), ("encode", [])])
    generate: tuple[str, object] = (
        "Text/Generate",
        [("queue", []), ("pull", []), ("prefill", []), ("decode", [])],
    )
    request = ("request", [("prepare", []), encode, encode, generate])
    assert tree_of(spans, int(CALLER_SPAN_ID, 16)) == [
        ("POST /v1/chat/completions", [("Router/Chat", [request])]),
    ]

    by_name = {span.name: dict(span.attributes or {}) for span in spans}
    assert by_name["request"]["triptych.outcome"] == "done"
    assert by_name["request"]["triptych.items"] == 2
    assert by_name["pull"]["triptych.backends"] == "tcp"
    assert by_name["POST /v1/chat/completions"]["http.response.status_code"] == 200
    told = repr([span.to_json() for span in spans])
    assert question.text not in told
    assert "base64" not in told
