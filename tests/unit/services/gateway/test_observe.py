"""Metrics and traces of the gateway; labels are few whatever clients send."""

import asyncio

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from starlette.types import Receive, Scope, Send

from tests.unit.services.gateway.conftest import Rest
from tests.unit.services.gateway.fakes import FakeRouter
from triptych.runtime import tracing
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tracing import Tracing
from triptych.services.gateway.observe import Observed, plain_path, route_of


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("//v1//chat/completions/", "/v1/chat/completions"),
        ("/v1/models/some/model", "/v1/models/..."),
        ("/v1/requests/a-users-own-id/timeline", "/v1/requests/..."),
        ("/wp-login.php", "other"),
        ("", "other"),
    ],
)
def test_paths_are_mapped_to_a_few_labels(path: str, route: str) -> None:
    assert route_of(plain_path(path)) == route


async def test_metrics_are_served_in_the_prometheus_format(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "process_cpu_seconds_total" in answer.text


async def test_status_and_route_are_counted_when_the_application_raises() -> None:
    telemetry = Telemetry()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            raise RuntimeError("a defect")
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    observed = Observed(application, telemetry, asyncio.get_running_loop().time)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(observed, raise_app_exceptions=False), base_url="http://localhost"
    ) as client:
        await client.get("/ready")
        await client.get("/ready")
        await client.get("/health")
    text = telemetry.metrics.render().decode()
    assert 'triptych_http_seconds_count{route="/ready",status="204"} 2.0' in text
    assert 'triptych_http_seconds_count{route="/health",status="0"} 1.0' in text


async def test_only_completions_are_traced_below_the_clients_span() -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    seen: list[str | None] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        span = tracing.current()
        seen.append(None if span is None else span.trace_id)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    telemetry = Telemetry(tracing=Tracing(TracerProvider()))
    observed = Observed(application, telemetry, asyncio.get_running_loop().time)

    async def ask(path: str) -> None:
        scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"traceparent", traceparent.encode())]}
        await observed(scope, _nothing, _nowhere)

    async with asyncio.TaskGroup() as group:  # each connection has its own context
        group.create_task(ask("/ready"))
        group.create_task(ask("/v1/chat/completions"))
    assert sorted(seen, key=str) == ["0af7651916cd43dd8448eb211c80319c", None]


async def _nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def _nowhere(message: object) -> None:
    del message
