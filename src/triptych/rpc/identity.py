"""Identity: who an instance is, for as long as its process runs."""

from collections.abc import Mapping
from dataclasses import dataclass

import grpc.aio

from triptych.engine.checkpoint import Checkpoint, open_checkpoint
from triptych.families.generic import StartProcessing
from triptych.families.model_files import BadModel
from triptych.rpc.app import server_of
from triptych.rpc.data_plane import ProcessDataPlane
from triptych.rpc.server import Register, RpcServer, check_port
from triptych.rpc.settings import InstanceSettings
from triptych.runtime.host import instance_name, new_epoch
from triptych.runtime.hub import model_directory
from triptych.runtime.process import CannotStart, tls_identity
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity
from triptych.transport.nixl import OnReset


@dataclass(frozen=True, slots=True)
class InstanceIdentity:
    """Identity that all parts of an instance share from its start."""

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

    def data_plane(self, settings: InstanceSettings, scope: TaskScope, on_reset: OnReset) -> ProcessDataPlane:
        """``scope`` fails when a transport cannot go on."""
        beyond_loopback = settings.allow_network or self.tls is not None
        return ProcessDataPlane(settings.transfers, settings.host, self.tls, beyond_loopback, on_reset, scope.fail)

    def server(self, settings: InstanceSettings, servicers: Mapping[str, Register]) -> RpcServer:
        """The server of these servicers, by the names of their services. Entering it raises Unavailable if the port is in use."""

        def register(server: grpc.aio.Server) -> None:
            for add in servicers.values():
                add(server)

        return server_of(settings, tuple(servicers), register, telemetry=self.telemetry, tls=self.tls)


def checkpoint_of(settings: InstanceSettings, process: StartProcessing) -> Checkpoint:
    """The checkpoint of the settings; ``process`` is as in ``open_checkpoint``. Blocks. Raises CannotStart."""
    try:
        return open_checkpoint(model_directory(settings.model), process)
    except BadModel as error:
        raise CannotStart(str(error)) from None
