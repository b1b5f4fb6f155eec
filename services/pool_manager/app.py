"""Wires up the pool manager."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from triptych.rpc.app import RpcApp, server_of
from triptych.runtime.clock import monotonic
from triptych.runtime.host import new_epoch
from triptych.runtime.process import tls_identity
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry

from .gauges import watch
from .service import PoolManagerService
from .servicer import SERVICE_NAME, PoolManagerServicer
from .settings import PoolManagerSettings


@asynccontextmanager
async def app(
    settings: PoolManagerSettings, telemetry: Telemetry | None = None
) -> AsyncGenerator[RpcApp[PoolManagerService]]:
    """Listen. Raises CannotStart."""
    telemetry = telemetry or Telemetry()
    tls = tls_identity(settings)
    async with AsyncExitStack() as stack:
        scope = await stack.enter_async_context(TaskScope("pool_manager"))
        service = PoolManagerService(settings, incarnation=new_epoch(), clock=monotonic, scope=scope)
        watch(telemetry.metrics, service)
        service.start()
        register = PoolManagerServicer(service).register
        server = await stack.enter_async_context(
            server_of(settings, (SERVICE_NAME,), register, telemetry=telemetry, tls=tls)
        )
        yield RpcApp(service, server, scope)
