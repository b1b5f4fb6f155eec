"""Transports that damage what they carry."""

from collections.abc import Callable

from triptych import ports
from triptych.domain.embedding import Ticket
from triptych.domain.instance import TransportOffer
from triptych.transport.data_plane import MemoryDataPlane
from triptych.transport.memory import MemoryNetwork


class SomeDamaged:
    """A ``damage`` that is true for one of so many pulls from the holders whose names begin so, by their checksums."""

    def __init__(self, holders: str, one_of: int) -> None:
        self.count = 0
        self._holders, self._one_of = holders, one_of

    def __call__(self, ticket: Ticket) -> bool:
        hit = ticket.holder.startswith(self._holders) and ticket.checksum % self._one_of == 0
        self.count += hit
        return hit


class DamagingTransport:
    """Wraps a ``ports.Transport``: flips a bit of each finished pull for which ``damage`` is true."""

    def __init__(self, inner: ports.Transport, damage: Callable[[Ticket], bool]) -> None:
        self._inner = inner
        self._damage = damage

    @property
    def backend(self) -> str:
        return self._inner.backend

    @property
    def arena(self) -> ports.Arena:
        return self._inner.arena

    def offer(self) -> TransportOffer:
        return self._inner.offer()

    async def connect(self, offer: TransportOffer) -> ports.Peer:
        return _DamagingPeer(await self._inner.connect(offer), self.arena, self._damage)

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        return self._inner.quarantined()

    async def close(self) -> None:
        await self._inner.close()


class DamagingDataPlane(MemoryDataPlane):
    """Damages what is pulled, as ``DamagingTransport``."""

    def __init__(
        self,
        network: MemoryNetwork,
        holder: Callable[[str], ports.HolderStub],
        damage: Callable[[Ticket], bool] = lambda _: False,
    ) -> None:
        super().__init__(network, holder)
        self._damage = damage

    def transport(self, arena: ports.Arena, check: ports.LeaseCheck) -> ports.Transport:
        return DamagingTransport(super().transport(arena, check), self._damage)


class _DamagingPeer:
    def __init__(self, inner: ports.Peer, arena: ports.Arena, damage: Callable[[Ticket], bool]) -> None:
        self._inner = inner
        self._arena = arena
        self._damage = damage

    @property
    def backend(self) -> str:
        return self._inner.backend

    async def pull(self, ticket: Ticket, destination_offset: int) -> None:
        await self._inner.pull(ticket, destination_offset)
        if self._damage(ticket):
            at = destination_offset + ticket.slot_nbytes // 2
            self._arena.write(at, bytes([self._arena.read(at, 1)[0] ^ 1]))

    async def close(self) -> None:
        await self._inner.close()
