"""A gateway with a router in the same process, called directly; the router's gRPC port stays open.

This is the one place where a service imports another ([ADR 8](../../docs/adr/0008-a-router-within-the-gateway.md)), and
where another service's settings are read: the router's, from the gateway's ``mount_router``. It is imported only when
the setting is used.
"""

import asyncio
import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from triptych.rpc.app import RpcApp
from triptych.runtime.process import CannotStart
from triptych.runtime.settings import SettingsError
from triptych.runtime.telemetry import Telemetry
from triptych.services.router import app as router
from triptych.services.router.service import RouterService
from triptych.services.router.settings import RouterSettings

from .app import GatewayApp, serve
from .settings import GatewaySettings


class GatewayWithRouter:
    """Run by ``runtime.process``.

    The gateway drains first, so that its answers can end. If either fails, the process ends.
    """

    def __init__(self, gateway: GatewayApp, mounted: RpcApp[RouterService]) -> None:
        self._gateway = gateway
        self._router = mounted
        self.port = gateway.port
        self.router_port = mounted.port

    async def missing(self) -> tuple[str, ...]:
        """Asks the gateway, which asks the router."""
        return await self._gateway.missing()

    async def drain(self) -> None:
        await self._gateway.drain()
        await self._router.drain()

    async def failed(self) -> str:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(service.failed()) for service in (self._gateway, self._router)]
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
        return done.pop().result()


@asynccontextmanager
async def app(settings: GatewaySettings, telemetry: Telemetry | None = None) -> AsyncGenerator[GatewayWithRouter]:
    """A gateway and its own router, which parses ``settings.mount_router`` as its command line.

    The router reads its environment and file as usual. Settings of the process (logs, traces, admin port, drain time)
    are the gateway's. Raises CannotStart.
    """
    telemetry = telemetry or Telemetry()
    try:
        router_settings = RouterSettings.load(shlex.split(settings.mount_router))
    except (SettingsError, ValueError) as error:
        raise CannotStart(f"--mount-router: {error}") from None
    async with (
        router.app(router_settings, telemetry) as mounted,
        serve(settings, mounted.service, telemetry) as gateway,
    ):
        yield GatewayWithRouter(gateway, mounted)
