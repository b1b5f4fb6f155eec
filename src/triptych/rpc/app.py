"""A service object and its gRPC server, as run by ``runtime.process``."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from triptych.rpc.server import Register, RpcServer
from triptych.rpc.settings import RpcServiceSettings
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity


class Serves(Protocol):
    async def missing(self) -> Sequence[str]:
        """Why it is not ready; empty if it is."""
        ...

    async def drain(self) -> None:
        """Refuse new requests; return once the running ones have ended."""
        ...


def server_of(
    settings: RpcServiceSettings,
    service_names: Sequence[str],
    register: Register,
    *,
    telemetry: Telemetry,
    tls: TlsIdentity | None,
) -> RpcServer:
    """The server configured by a service's settings. Entering it raises Unavailable if the port is in use."""
    return RpcServer(
        host=settings.host,
        port=settings.port,
        service_names=service_names,
        register=register,
        max_message_nbytes=settings.max_message_bytes,
        max_concurrent_calls=settings.max_concurrent_calls,
        telemetry=telemetry,
        tls=tls,
    )


ServiceT = TypeVar("ServiceT", bound=Serves)


class RpcApp(Generic[ServiceT]):
    """``scope`` owns the service's tasks, including the vital ones. ``port`` is the port it listens on."""

    def __init__(self, service: ServiceT, server: RpcServer, scope: TaskScope) -> None:
        self.service = service
        self.port = server.port
        self._server = server
        self._scope = scope

    async def missing(self) -> Sequence[str]:
        return await self.service.missing()

    async def drain(self) -> None:
        """Health checks fail first, so that nothing new arrives while running requests end."""
        await self._server.announce_drain()
        await self.service.drain()

    async def failed(self) -> str:
        return await self._scope.failed()
