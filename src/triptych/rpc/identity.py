"""Who an instance is, for as long as its process runs."""

from dataclasses import dataclass

from triptych.rpc.server import check_port
from triptych.runtime.host import instance_name, new_epoch
from triptych.runtime.process import tls_identity
from triptych.runtime.settings import InstanceSettings
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity


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
