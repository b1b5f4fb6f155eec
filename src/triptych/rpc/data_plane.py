"""The data plane of a process: transports between processes, and gRPC stubs of holders."""

from collections.abc import Callable
from dataclasses import dataclass, field

from triptych.engine.arenas import open_arena
from triptych.errors import TransferFailed
from triptych.policy.addresses import why_not_called
from triptych.ports import Arena, LeaseCheck
from triptych.rpc.stubs import InstanceStub
from triptych.runtime.host import machine_name
from triptych.runtime.process import CannotStart
from triptych.runtime.tls import TlsIdentity
from triptych.transport.memory import MemoryNetwork
from triptych.transport.nixl import OnReset
from triptych.transport.options import TransferOptions
from triptych.transport.start import start_transports
from triptych.transport.transport_set import TransportSet


@dataclass(frozen=True, slots=True)
class ProcessDataPlane:
    """``transport.data_plane.DataPlane`` over the transports that work here."""

    transfers: TransferOptions
    host: str
    """IP address on which transports listen."""
    tls: TlsIdentity | None
    beyond_loopback: bool
    """Whether holders may be called at other addresses than loopback."""
    on_reset: OnReset = field(default=lambda _backend, _cause: None)
    on_failure: Callable[[str], None] = field(default=lambda _: None)
    """Called when a transport cannot go on."""

    def arena(self, where: str, nbytes: int, *, instance_id: str, epoch: int, device: str, part: str = "") -> Arena:
        """As ``open_arena``."""
        return open_arena(where, nbytes, instance_id=instance_id, epoch=epoch, device=device, part=part)

    async def open(
        self,
        arena: Arena,
        check: LeaseCheck,
        *,
        connect_timeout_s: float = 5.0,
        preferred: str = "",
        own: MemoryNetwork | None = None,
    ) -> TransportSet:
        """As ``start_transports``. Raises CannotStart."""
        try:
            return await start_transports(
                self.transfers,
                arena,
                machine=machine_name(),
                host=self.host,
                check=check,
                connect_timeout_s=connect_timeout_s,
                preferred=preferred,
                tls=self.tls,
                on_reset=self.on_reset,
                on_failure=self.on_failure,
                network=own,
            )
        except ValueError as error:
            raise CannotStart(str(error)) from None

    def holder(self, address: str) -> InstanceStub:
        """Raises TransferFailed for an address that must not be called."""
        reason = why_not_called(address, beyond_loopback=self.beyond_loopback)
        if reason is not None:
            raise TransferFailed(f"the encoder's address in the ticket is refused: {reason}")
        return InstanceStub(
            f"dns:///{address}", self.tls
        )  # an explicit scheme, so that gRPC does not parse the address as one
