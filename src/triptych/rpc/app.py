"""A service object behind its gRPC server, as ``runtime.process`` runs it."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from triptych.rpc.server import Register, RpcServer
from triptych.runtime.settings import RpcServiceSettings
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity


class Serves(Protocol):
    async def missing(self) -> Sequence[str]:
        """What keeps it from doing its work now; empty when it is ready."""
        ...

    async def drain(self) -> None:
        """Refuse what is new; return once what runs has come to its end."""
        ...


def server_of(
    settings: RpcServiceSettings,
    service_names: Sequence[str],
    register: Register,
    *,
    telemetry: Telemetry,
    tls: TlsIdentity | None,
) -> RpcServer:
    """The server that a service's settings ask for. Raises Unavailable once it is entered and the port is taken."""
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
    """``scope`` owns the service's tasks, the vital ones among them. ``port`` is the one that is listened on."""

    def __init__(self, service: ServiceT, server: RpcServer, scope: TaskScope) -> None:
        self.service = service
        self.port = server.port
        self._server = server
        self._scope = scope

    async def missing(self) -> Sequence[str]:
        return await self.service.missing()

    async def drain(self) -> None:
        """Health checks hear of it first, so that nothing new is sent while what runs ends."""
        await self._server.announce_drain()
        await self.service.drain()

    async def failed(self) -> str:
        return await self._scope.failed()
