"""A service object behind its gRPC server, as ``runtime.process`` runs it."""

from typing import Generic, Protocol, TypeVar

from triptych.rpc.server import RpcServer
from triptych.runtime.tasks import TaskScope


class Drains(Protocol):
    async def drain(self) -> None:
        """Refuse what is new; return once what runs has come to its end."""
        ...


ServiceT = TypeVar("ServiceT", bound=Drains)


class RpcApp(Generic[ServiceT]):
    """``scope`` owns the service's tasks, the vital ones among them. ``port`` is the one that is listened on."""

    def __init__(self, service: ServiceT, server: RpcServer, scope: TaskScope) -> None:
        self.service = service
        self.port = server.port
        self._server = server
        self._scope = scope

    async def drain(self) -> None:
        """Health checks hear of it first, so that nothing new is sent while what runs ends."""
        await self._server.announce_drain()
        await self.service.drain()

    async def failed(self) -> str:
        return await self._scope.failed()
