"""Who an instance is, for as long as its process runs."""

from collections.abc import Mapping
from dataclasses import dataclass

import grpc.aio

from triptych.ports import Arena, LeaseCheck
from triptych.rpc.app import server_of
from triptych.rpc.server import Register, RpcServer, check_port
from triptych.rpc.settings import InstanceSettings
from triptych.runtime.host import instance_name, machine_name, new_epoch
from triptych.runtime.process import CannotStart, tls_identity
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity
from triptych.transport.memory import MemoryNetwork
from triptych.transport.nixl import OnReset
from triptych.transport.start import start_transports
from triptych.transport.transport_set import TransportSet


@dataclass(frozen=True, slots=True)
class InstanceIdentity:
    """What all parts of an instance share from its start."""

    instance_id: str
    epoch: int
    """Rises with each start."""
    tls: TlsIdentity | None
    telemetry: Telemetry

    @classmethod
    def new(cls, kind: str, settings: InstanceSettings, telemetry: Telemetry | None) -> "InstanceIdentity":
        """``kind`` begins the name of an instance without one. Raises CannotStart, and Unavailable if the port is in use: before
        anything is loaded.
        """
        check_port(settings.host, settings.port)
        telemetry = telemetry or Telemetry()
        epoch = new_epoch()
        instance_id = settings.instance_id or instance_name(kind, settings.port, epoch)
        return cls(instance_id, epoch, tls_identity(settings, telemetry), telemetry)

    async def transports(
        self,
        settings: InstanceSettings,
        arena: Arena,
        check: LeaseCheck,
        *,
        connect_timeout_s: float,
        on_reset: OnReset,
        scope: TaskScope,
        preferred: str = "",
        network: MemoryNetwork | None = None,
    ) -> TransportSet:
        """As ``start_transports``. ``scope`` fails when one cannot go on. Raises CannotStart."""
        try:
            return await start_transports(
                settings.transfers,
                arena,
                machine=machine_name(),
                host=settings.host,
                check=check,
                connect_timeout_s=connect_timeout_s,
                preferred=preferred,
                tls=self.tls,
                on_reset=on_reset,
                on_failure=scope.fail,
                network=network,
            )
        except ValueError as error:
            raise CannotStart(str(error)) from None

    def server(self, settings: InstanceSettings, servicers: Mapping[str, Register]) -> RpcServer:
        """The server of these servicers, by the names of their services. Entering it raises Unavailable if the port is in use."""

        def register(server: grpc.aio.Server) -> None:
            for add in servicers.values():
                add(server)

        return server_of(settings, tuple(servicers), register, telemetry=self.telemetry, tls=self.tls)
