"""What a process tells about itself: its metrics, its traces, and the port where they can be asked for."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus

from triptych.runtime import admin, metrics
from triptych.runtime.lag import LoopLag
from triptych.runtime.settings import ServiceSettings
from triptych.runtime.tasks import TaskScope
from triptych.runtime.tracing import Tracing, TracingUnavailable

_LOOP_LAG_WARN_S = 0.25


Missing = Callable[[], Awaitable[Sequence[str]]]
"""What keeps a process from doing its work now; empty when it is ready."""


async def _starting() -> Sequence[str]:
    return ("it is starting",)


class Telemetry:
    """One per process, made before anything else. Made without arguments it measures, and tells nobody."""

    def __init__(
        self,
        *,
        tracing: Tracing | None = None,
        admin_host: str = "",
        admin_port: int = 0,
        loop_lag_warn_s: float = _LOOP_LAG_WARN_S,
    ) -> None:
        """``admin_port`` 0 opens none."""
        self.metrics = metrics.Metrics()
        self.tracing = tracing
        self._missing: Missing = _starting
        self._admin_host = admin_host
        self._admin_port = admin_port
        self._lag = LoopLag(self.metrics, warn_s=loop_lag_warn_s)

    @classmethod
    def of(cls, service: str, settings: ServiceSettings) -> "Telemetry":
        """As the settings say. Ends the process with one line when traces are asked for and cannot be made."""
        try:
            tracing = Tracing.exporting(service, settings.otlp_endpoint) if settings.otlp_endpoint else None
        except TracingUnavailable as error:
            raise SystemExit(f"{service}: {error}") from None
        return cls(
            tracing=tracing,
            admin_host=settings.admin_host,
            admin_port=settings.admin_port,
            loop_lag_warn_s=settings.loop_lag_warn_s,
        )

    def ready_when(self, missing: Missing) -> None:
        """The process is up: from now on ``/ready`` answers what ``missing`` does."""
        self._missing = missing

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Watch the event loop, serve the admin port; at the end send the last spans."""
        async with AsyncExitStack() as stack:
            if self.tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self.tracing.close)
            scope = await stack.enter_async_context(TaskScope("telemetry", limit=1))
            scope.spawn(self._lag.run(), name="loop-lag")
            if self._admin_port:
                await stack.enter_async_context(admin.serve(self._admin_host, self._admin_port, self.routes()))
            yield

    def routes(self) -> dict[str, admin.Route]:
        """What the admin port answers."""
        return {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}

    async def _health(self) -> admin.Answer:
        return admin.Answer.json(HTTPStatus.OK, {"status": "ok"})

    async def _ready(self) -> admin.Answer:
        missing = list(await self._missing())
        status = HTTPStatus.SERVICE_UNAVAILABLE if missing else HTTPStatus.OK
        return admin.Answer.json(status, {"ready": not missing, "missing": missing, "pid": os.getpid()})

    async def _metrics(self) -> admin.Answer:
        return admin.Answer(HTTPStatus.OK, metrics.CONTENT_TYPE, self.metrics.render())
