"""A gateway with a router in its own process: called as an object, its gRPC port open as ever.

The one place where a service imports another ([ADR 8](../../docs/adr/0008-a-router-within-the-gateway.md)), and where
settings are read outside of a process's beginning: the router's, from the gateway's ``mount_router``. It is imported only
when the setting asks for it.
"""

import asyncio
import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from triptych.rpc.app import RpcApp
from triptych.runtime.process import CannotStart
from triptych.runtime.settings import SettingsError
from triptych.runtime.telemetry import Telemetry

from ..router import app as router  # noqa: TID252 - in the wheel the services lie within triptych
from ..router.service import RouterService  # noqa: TID252
from ..router.settings import RouterSettings  # noqa: TID252
from .app import GatewayApp, serve
from .settings import GatewaySettings


class GatewayWithRouter:
    """What ``runtime.process`` runs. The gateway drains first, so that its answers can end; each is vital."""

    def __init__(self, gateway: GatewayApp, mounted: RpcApp[RouterService]) -> None:
        self._gateway = gateway
        self._router = mounted
        self.port = gateway.port
        self.router_port = mounted.port

    async def missing(self) -> tuple[str, ...]:
        """What the gateway says, which asks the router."""
        return await self._gateway.missing()

    async def drain(self) -> None:
        await self._gateway.drain()
        await self._router.drain()

    async def failed(self) -> str:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.failed()) for one in (self._gateway, self._router)]
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
        return done.pop().result()


@asynccontextmanager
async def app(settings: GatewaySettings, telemetry: Telemetry | None = None) -> AsyncGenerator[GatewayWithRouter]:
    """The gateway in front of a router of its own, which reads ``settings.mount_router`` as its command line.

    The router's environment and file count as in a process of its own. What belongs to a process (logs, traces, the
    admin port, the time to drain) is the gateway's. Raises CannotStart.
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
