"""In-process backend: copies from one arena to another. For hybrid instances, simulation and tests."""

from collections.abc import Awaitable, Callable

from triptych.domain.embedding import Ticket
from triptych.domain.instance import TransportOffer
from triptych.errors import LeaseLost, TransferFailed
from triptych.policy.transport import MEMORY
from triptych.ports import Arena, LeaseCheck
from triptych.transport.arena import PROBE_NBYTES
from triptych.transport.slot import check_ticket

BACKEND = MEMORY

BeforePull = Callable[[str, Ticket], Awaitable[None]]
"""Called with the reader's instance id before each copy; may wait (slow link) or raise (broken link)."""


class MemoryNetwork:
    """The instances of one process that can read each other; all of them are given the same object."""

    def __init__(self, before_pull: BeforePull | None = None) -> None:
        self._holders: dict[bytes, MemoryTransport] = {}
        self._before_pull = before_pull

    def join(self, transport: "MemoryTransport") -> None:
        self._holders[transport.arena.probe] = transport

    def leave(self, transport: "MemoryTransport") -> None:
        """Make a holder unreadable; tests use this to kill one."""
        self._holders.pop(transport.arena.probe, None)

    def holder(self, probe: bytes) -> "MemoryTransport | None":
        return self._holders.get(probe)

    async def delay(self, reader: str, ticket: Ticket) -> None:
        if self._before_pull is not None:
            await self._before_pull(reader, ticket)


class MemoryTransport:
    """Transport of one instance. ``check`` decides each read."""

    def __init__(self, network: MemoryNetwork, arena: Arena, *, host: str, check: LeaseCheck) -> None:
        self.network = network
        self.arena = arena
        self._host = host
        self.may_read = check
        self.closed = False
        network.join(self)

    @property
    def backend(self) -> str:
        return BACKEND

    def offer(self) -> TransportOffer:
        return TransportOffer(BACKEND, self._host, self.arena.probe)

    async def connect(self, offer: TransportOffer) -> "MemoryPeer":
        holder = self.network.holder(offer.metadata)
        if offer.backend != BACKEND or holder is None:
            raise TransferFailed("the holder is not in this process")
        if holder.arena.read(0, PROBE_NBYTES) != offer.metadata:
            raise TransferFailed("the holder's memory does not start with its probe")
        return MemoryPeer(self, offer.metadata)

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        """Always empty: a copy cannot be interrupted."""
        return ()

    async def close(self) -> None:
        self.closed = True
        self.network.leave(self)


class MemoryPeer:
    """A holder in the same process."""

    def __init__(self, reader: MemoryTransport, probe: bytes) -> None:
        self._reader = reader
        self._probe = probe
        self._closed = False

    @property
    def backend(self) -> str:
        return BACKEND

    async def pull(self, ticket: Ticket, destination_offset: int) -> None:
        check_ticket(ticket)
        arena, nbytes = self._reader.arena, ticket.slot_nbytes
        if not arena.holds(destination_offset, nbytes):
            raise TransferFailed(f"{nbytes} bytes at {destination_offset} are not inside the own arena")
        await self._reader.network.delay(arena.instance_id, ticket)
        if self._closed or self._reader.closed:
            raise TransferFailed("the link to the holder is closed")
        holder = self._reader.network.holder(self._probe)
        if holder is None:
            raise TransferFailed("the holder is gone")
        if not holder.arena.holds(ticket.offset, nbytes):
            raise TransferFailed(f"{nbytes} bytes at {ticket.offset} are not inside the holder's arena")
        if not holder.may_read(ticket.lease_id, ticket.offset, nbytes):
            raise LeaseLost("the holder does not know the lease")
        arena.write(destination_offset, holder.arena.read(ticket.offset, nbytes))

    async def close(self) -> None:
        self._closed = True
