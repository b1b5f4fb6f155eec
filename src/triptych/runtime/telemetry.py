"""Telemetry of one process: metrics, traces, and the admin port."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus

from triptych.runtime import admin, metrics
from triptych.runtime.lag import LoopLag
from triptych.runtime.settings import ServiceSettings
from triptych.runtime.tasks import TaskScope
from triptych.runtime.tls_expiry import TlsExpiry
from triptych.runtime.tracing import Tracing, TracingUnavailable

Missing = Callable[[], Awaitable[Sequence[str]]]
"""Reports what a process lacks to do its work; empty when it is ready."""


async def _starting() -> Sequence[str]:
    return (admin.STARTING,)


class Telemetry:
    """Telemetry of a process, created first. Without arguments it measures but exports nothing."""

    def __init__(self, settings: ServiceSettings | None = None, *, tracing: Tracing | None = None) -> None:
        self.metrics = metrics.Metrics()
        self.tracing = tracing
        self._missing: Missing = _starting
        self._settings = settings or ServiceSettings()
        self._routes: dict[str, admin.Route] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
        }
        self.certificates = TlsExpiry(self.metrics)
        self._lag = LoopLag(self.metrics, warn_s=self._settings.loop_lag_warn_s)

    @classmethod
    def of(cls, service: str, settings: ServiceSettings) -> "Telemetry":
        """Make the telemetry of the settings. Exits with one line when tracing is configured but not installed."""
        try:
            endpoint, sampling = settings.otlp_endpoint, settings.trace_sampling
            tracing = Tracing.exporting(service, endpoint, sampling) if endpoint else None
        except TracingUnavailable as error:
            raise SystemExit(f"{service}: {error}") from None
        return cls(settings, tracing=tracing)

    def ready_when(self, missing: Missing) -> None:
        """Let ``/ready`` answer with ``missing`` from now on."""
        self._missing = missing

    def show(self, path: str, document: Callable[[admin.Query], Awaitable[object]]) -> None:
        """Answer ``path`` of the admin port with this JSON document from now on."""

        async def route(query: admin.Query) -> admin.Answer:
            return admin.Answer.json(HTTPStatus.OK, await document(query))

        self._routes[path] = route

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Measure the event loop and serve the admin port; export the last spans at the end."""
        async with AsyncExitStack() as stack:
            if self.tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self.tracing.close)
            scope = await stack.enter_async_context(TaskScope("telemetry", limit=2))
            scope.spawn(self._lag.run(), name="loop-lag")
            scope.spawn(self.certificates.run(), name="certificates")
            if self._settings.admin_port:
                await stack.enter_async_context(
                    admin.serve(self._settings.admin_host, self._settings.admin_port, self.routes())
                )
            yield

    def routes(self) -> Mapping[str, admin.Route]:
        """Routes of the admin port, also those that are added later."""
        return self._routes

    async def _health(self, _: admin.Query) -> admin.Answer:
        return admin.Answer.json(HTTPStatus.OK, {"status": "ok"})

    async def _ready(self, _: admin.Query) -> admin.Answer:
        missing = list(await self._missing())
        status = HTTPStatus.SERVICE_UNAVAILABLE if missing else HTTPStatus.OK
        return admin.Answer.json(status, {"ready": not missing, "missing": missing, "pid": os.getpid()})

    async def _metrics(self, _: admin.Query) -> admin.Answer:
        return admin.Answer(HTTPStatus.OK, metrics.CONTENT_TYPE, self.metrics.render())
