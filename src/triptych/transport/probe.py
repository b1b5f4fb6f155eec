"""From several backends to one link that has been seen to work, and the book of such links."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from triptych.domain.instance import TransportOffer
from triptych.errors import Overloaded, TransferFailed, TriptychError
from triptych.policy.transport import MEMORY, NIXL, SHM, TCP, Endpoint, rank_backends
from triptych.ports import Peer, Transport
from triptych.transport.nixl_offer import offers_rdma

logger = logging.getLogger(__name__)

_MAX_OFFERS = 16


def available_backends() -> tuple[str, ...]:
    """Backends that can be used with what is installed here."""
    nixl = find_spec("nixl_cu12") is not None or find_spec("nixl_cu13") is not None
    shm = hasattr(os, "memfd_create")
    here = {MEMORY: True, SHM: shm, NIXL: nixl, TCP: True}
    return tuple(backend for backend, usable in here.items() if usable)


class TransportSet:
    """All backends of one process, over one arena."""

    def __init__(
        self, transports: Sequence[Transport], *, connect_timeout_s: float, preferred: str | None = None
    ) -> None:
        """``preferred`` is tried before all others. Raises ValueError for a backend that is there twice or not at all."""
        self._transports = {transport.backend: transport for transport in transports}
        if len(self._transports) != len(transports) or not transports:
            raise ValueError("a process has each transport backend once, and one at least")
        if preferred is not None and preferred not in self._transports:
            raise ValueError(f"transport {preferred!r} is preferred, but there are only {sorted(self._transports)}")
        self._connect_timeout_s = connect_timeout_s
        self._preferred = preferred

    @property
    def preferred(self) -> str | None:
        """The operator's choice, tried before what is ranked best."""
        return self._preferred

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(self._transports)

    def offers(self) -> tuple[TransportOffer, ...]:
        """One for each backend: what readers need to know."""
        return tuple(transport.offer() for transport in self._transports.values())

    async def connect(self, offers: Sequence[TransportOffer]) -> Peer:
        """Reach a holder over the best backend that works: each is proven by reading the holder's probe.

        Raises TransferFailed, which names what was tried, within ``connect_timeout_s``.
        """
        theirs = {offer.backend: offer for offer in offers[:_MAX_OFFERS]}
        ranked = rank_backends(_endpoints(self.offers()), _endpoints(theirs.values()), self._preferred)
        failures: list[str] = []
        for choice in ranked:
            try:
                # Each has its share of the time, so that one that hangs leaves time for the next.
                async with asyncio.timeout(self._connect_timeout_s / len(ranked)):
                    peer = await self._transports[choice.backend].connect(theirs[choice.backend])
            except TimeoutError:
                failures.append(f"{choice.backend}: no answer in time")
            except TriptychError as error:
                failures.append(f"{choice.backend}: {error.message}")
            else:
                logger.info("reading a holder's memory over %s (%s)", choice.backend, choice.reason)
                return peer
        tried = "; ".join(failures) or "reader and holder have no transport in common"
        raise TransferFailed(f"the holder's memory could not be reached ({tried})")

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the own arena that a late write of any backend may still reach."""
        return tuple(part for transport in self._transports.values() for part in transport.quarantined())

    async def close(self) -> None:
        for transport in self._transports.values():
            await transport.close()


def _endpoints(offers: Iterable[TransportOffer]) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(offer.backend, offer.host, rdma=offers_rdma(offer)) for offer in offers)


@dataclass(slots=True)
class _Link:
    peer: Peer
    offers: tuple[TransportOffer, ...]
    """It was made with these."""
    users: int = 0


class PeerBook:
    """Links to holders, one for each incarnation, made on first use and shared by all who ask meanwhile.

    A link that failed leaves the book at once, so that the next one who asks gets a new one; it is closed when its last
    user has left, never under those who still read over it.
    """

    def __init__(self, connect: Callable[[Sequence[TransportOffer]], Awaitable[Peer]], *, limit: int) -> None:
        """Beyond ``limit`` links the one that was used least recently leaves the book."""
        self._connect = connect
        self._limit = limit
        self._links: dict[tuple[str, int], _Link] = {}
        self._pending: dict[tuple[str, int], asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._links)

    def by_backend(self) -> dict[tuple[str, ...], int]:
        """How many links there are over each backend."""
        return dict(Counter((link.peer.backend,) for link in self._links.values()))

    async def meet(self, instance_id: str, epoch: int, offers: Sequence[TransportOffer]) -> Peer:
        """Make sure that there is a link, and one by what the holder offers now. Raises TransferFailed; all who wait for
        one attempt get the same answer. Who reads over the former link goes on.
        """
        key = (instance_id, epoch)
        link = await self._link(key, offers)
        if link.offers != tuple(offers) and key not in self._pending:
            former, link = link, await self._make(key, offers)
            if former.users == 0:
                await former.peer.close()
        return link.peer

    @asynccontextmanager
    async def use(self, instance_id: str, epoch: int, offers: Sequence[TransportOffer]) -> AsyncIterator[Peer]:
        """The link, for one read. A body that fails (TransferFailed) or is given up takes the link out of the book."""
        key = (instance_id, epoch)
        link = await self._link(key, offers)
        link.users += 1
        try:
            yield link.peer
        except (TransferFailed, asyncio.CancelledError):
            if self._links.get(key) is link:
                del self._links[key]
            raise
        finally:
            link.users -= 1
            if link.users == 0 and self._links.get(key) is not link:
                await link.peer.close()

    async def close(self) -> None:
        while self._links:
            await self._retire(next(iter(self._links)))

    async def _link(self, key: tuple[str, int], offers: Sequence[TransportOffer]) -> _Link:
        while (link := self._links.pop(key, None)) is None:
            pending = self._pending.get(key)
            if pending is None:
                return await self._make(key, offers)
            await asyncio.shield(pending)
        self._links[key] = link
        return link

    async def _make(self, key: tuple[str, int], offers: Sequence[TransportOffer]) -> _Link:
        if len(self._pending) >= self._limit:
            raise Overloaded(f"{self._limit} links to holders are being made, which is the limit")
        pending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending[key] = pending
        try:
            peer = await self._connect(offers)
        except TriptychError as error:
            pending.set_exception(error)
            pending.exception()  # it may be that nobody else waits
            raise
        finally:
            del self._pending[key]
            if not pending.done():
                pending.set_result(None)  # there is a link, or the one who made it left: look again
        link = self._links[key] = _Link(peer, tuple(offers))
        instance_id, epoch = key
        for other in [(i, e) for i, e in self._links if i == instance_id and e < epoch]:
            await self._retire(other)
        while len(self._links) > self._limit:
            await self._retire(next(iter(self._links)))
        return link

    async def _retire(self, key: tuple[str, int]) -> None:
        link = self._links.pop(key)
        if link.users == 0:
            await link.peer.close()
