"""How instances read each other's memory. Over the transports of the settings in a process (``rpc.data_plane``), by copying in a simulation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from triptych.domain.embedding import LeaseId
from triptych.domain.instance import InstanceInfo
from triptych.ports import Arena, Encoder, HolderStub, LeaseCheck, Transport
from triptych.transport.arena import HostArena
from triptych.transport.arena_store import ArenaStore
from triptych.transport.memory import MemoryNetwork, MemoryTransport
from triptych.transport.transport_set import TransportSet


class DataPlane(Protocol):
    def arena(self, where: str, nbytes: int, *, instance_id: str, epoch: int, device: str, part: str = "") -> Arena:
        """Memory that others can read: in the memory of ``device`` (``where`` is ``device``), or of the host (``host``).

        ``part`` tells the arenas of one instance apart. Blocks while all memory is touched.
        """
        ...

    async def open(
        self,
        arena: Arena,
        check: LeaseCheck,
        *,
        connect_timeout_s: float = 5.0,
        preferred: str = "",
        own: MemoryNetwork | None = None,
    ) -> TransportSet:
        """Transports by which others read ``arena``, as ``check`` allows, and by which it takes what is pulled.

        ``preferred``: tried first, unless empty. ``own``: other arenas of this process, read directly.
        """
        ...

    def holder(self, address: str) -> HolderStub:
        """The holder at an address from a ticket. Raises TransferFailed for one that must not be called."""
        ...


class MemoryDataPlane:
    """A ``DataPlane`` of instances that are all in this process, on one ``network``."""

    def __init__(self, network: MemoryNetwork, holder: Callable[[str], HolderStub], host: str = "") -> None:
        """``host``: of the instance, as its offers name it."""
        self._network = network
        self._host = host
        self.holder = holder

    def arena(self, where: str, nbytes: int, *, instance_id: str, epoch: int, device: str, part: str = "") -> Arena:
        """Always in host memory."""
        del where, device
        return HostArena(nbytes, instance_id=instance_id, epoch=epoch, part=part)

    async def open(
        self,
        arena: Arena,
        check: LeaseCheck,
        *,
        connect_timeout_s: float = 5.0,
        preferred: str = "",
        own: MemoryNetwork | None = None,
    ) -> TransportSet:
        """All arenas are on the network, those of ``own`` too."""
        del preferred, own
        return TransportSet([self.transport(arena, check)], connect_timeout_s=connect_timeout_s)

    def transport(self, arena: Arena, check: LeaseCheck) -> Transport:
        """The only transport of an arena."""
        return MemoryTransport(self._network, arena, host=self._host, check=check)


class OwnHolder:
    """The encoder of an instance as its text service uses it, a ``HolderStub``: read from memory to memory only."""

    def __init__(self, encoder: Encoder, store: ArenaStore) -> None:
        """``store``: the encoder's."""
        self.network = MemoryNetwork()
        """The encoder's arena is on it."""
        self._encoder = encoder
        self._memory = MemoryTransport(self.network, store.arena, host="", check=store.may_read)

    async def describe(self) -> InstanceInfo:
        return replace(await self._encoder.describe(), offers=(self._memory.offer(),))

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await self._encoder.release(lease_ids)

    async def close(self) -> None:
        """The instance owns the encoder."""
