"""A reader's connections to the holders named by tickets: opened on first use, shared, bounded, closed when idle."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from triptych.domain.embedding import HolderRef, LeaseId
from triptych.domain.instance import InstanceInfo, TransportOffer
from triptych.errors import DeadlineExceeded, Overloaded, TransferFailed, TriptychError
from triptych.ports import Clock, HolderStub, Peer

logger = logging.getLogger(__name__)

_DESCRIBE_TIMEOUT_S = 2.0
_IDLE_S = 600.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 8.0
"""Shortest and longest pauses before a silent address is asked again, seconds. The pause doubles with each further
failure.
"""
_MAX_BACKOFFS = 1024


@dataclass(slots=True)
class _Link:
    """A connection to the memory of one incarnation of a holder."""

    peer: Peer
    instance_id: str
    epoch: int
    users: int = 0


@dataclass(frozen=True, slots=True)
class _Attempt:
    holder: HolderRef
    ended: asyncio.Future[None]
    """Carries the attempt's error. It also ends, without a link, when its caller leaves."""


@dataclass(slots=True)
class _Member:
    stub: HolderStub
    used_s: float
    users: int = 0
    """Running pulls and calls."""
    link: _Link | None = None
    attempt: _Attempt | None = None
    known: bool = False
    """Whether the address has ever answered."""


@dataclass(frozen=True, slots=True)
class _Backoff:
    failures: int
    until_s: float


class PeerPool:
    """Pool of one stub and one memory link per address. Concurrent callers share one connection attempt.

    Addresses come with tickets and are not trusted. Before its memory is connected, a holder must identify itself as
    the instance and epoch that the ticket names.

    An address that does not answer is dropped after the attempt, and asked again after a backoff. Tickets that name it
    fail at once meanwhile, as each attempt holds memory for its pull. A restarted holder gets a new link, while readers
    of the old one go on. A failed link is not reused; it is closed after its last reader.
    """

    def __init__(
        self,
        open_stub: Callable[[str], HolderStub],
        connect: Callable[[Sequence[TransportOffer]], Awaitable[Peer]],
        *,
        limit: int,
        clock: Clock,
        own: tuple[str, int, HolderStub] | None = None,
    ) -> None:
        """``open_stub`` raises TransferFailed for an address that must not be called.

        The pool has at most ``limit`` holders; a further one replaces the least recently used idle one. ``own`` is the
        holder in this process (instance id, epoch, object), used whatever address a ticket has.
        """
        self._open_stub = open_stub
        self._connect = connect
        self._limit = limit
        self._clock = clock
        self._own = own
        self._members: dict[str, _Member] = {}
        """Members by address, least recently used first."""
        self._backoffs: dict[str, _Backoff] = {}
        """Backoffs by address, oldest first."""

    def __len__(self) -> int:
        return len(self._members)

    def by_backend(self) -> dict[tuple[str, ...], int]:
        """Number of links per backend."""
        links = (member.link for member in self._members.values())
        return dict(Counter((link.peer.backend,) for link in links if link is not None))

    @asynccontextmanager
    async def use(self, holder: HolderRef) -> AsyncIterator[Peer]:
        """The link to this incarnation, for one read. Raises TransferFailed or Overloaded.

        If the body raises TransferFailed or is cancelled, the next caller gets a new link.
        """
        async with self._member(holder) as member:
            link = await self._link(member, holder)
            link.users += 1
            try:
                yield link.peer
            except (TransferFailed, asyncio.CancelledError):
                if member.link is link:
                    member.link = None
                raise
            finally:
                link.users -= 1
                if link.users == 0 and member.link is not link:
                    await link.peer.close()

    async def release(self, holder: HolderRef, lease_ids: Sequence[LeaseId]) -> None:
        """Release leases. Raises the stub's errors, TransferFailed, Overloaded."""
        async with self._member(holder) as member:
            await member.stub.release(lease_ids)
            member.known = True

    async def close_idle(self) -> None:
        """Close holders unused for a long time."""
        before_s = self._clock() - _IDLE_S
        for address, member in list(self._members.items()):
            if member.users == 0 and member.used_s <= before_s:
                del self._members[address]
                await _close(member)

    async def close(self) -> None:
        while self._members:
            _, member = self._members.popitem()
            await _close(member)

    @asynccontextmanager
    async def _member(self, holder: HolderRef) -> AsyncIterator[_Member]:
        address = self._address(holder)
        member = self._members.pop(address, None)
        if member is None:
            self._check_room()
            member = _Member(self._stub(address), self._clock())
        self._members[address] = member
        member.users += 1
        try:
            if len(self._members) > self._limit:
                await self._evict()
            yield member
        finally:
            member.users -= 1
            member.used_s = self._clock()
            if member.users == 0 and not member.known and self._members.pop(address, None) is not None:
                await _close(member)

    def _address(self, holder: HolderRef) -> str:
        if self._own is not None and self._own[:2] == (holder.instance_id, holder.epoch):
            return ""
        return holder.address

    def _stub(self, address: str) -> HolderStub:
        if self._own is not None and not address:
            return self._own[2]
        return self._open_stub(address)

    def _check_room(self) -> None:
        if len(self._members) >= self._limit and all(member.users for member in self._members.values()):
            raise Overloaded(f"{self._limit} holders are being read from, which is the limit")

    async def _evict(self) -> None:
        while len(self._members) > self._limit:
            idle = next(address for address, member in self._members.items() if member.users == 0)
            await _close(self._members.pop(idle))

    async def _link(self, member: _Member, holder: HolderRef) -> _Link:
        while True:
            link = member.link
            if link is not None and (link.instance_id, link.epoch) == (holder.instance_id, holder.epoch):
                return link
            if member.attempt is None:
                return await self._make(member, holder)
            ended, same = member.attempt.ended, member.attempt.holder == holder
            with contextlib.suppress(*(() if same else (TriptychError,))):
                await asyncio.shield(ended)

    async def _make(self, member: _Member, holder: HolderRef) -> _Link:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member.attempt = _Attempt(holder, ended)
        try:
            return await self._connected(member, holder)
        except TriptychError as error:
            ended.set_exception(error)
            ended.exception()  # mark as retrieved: there may be no other waiter
            raise
        finally:
            member.attempt = None
            if not ended.done():
                ended.set_result(None)

    async def _connected(self, member: _Member, holder: HolderRef) -> _Link:
        info = await self._describe(member, holder)
        member.known = True
        if (info.instance_id, info.epoch) != (holder.instance_id, holder.epoch):
            raise TransferFailed(f"encoder {holder.instance_id!r} (epoch {holder.epoch}) is not where its ticket says")
        peer = await self._connect(info.offers)
        former, member.link = member.link, _Link(peer, info.instance_id, info.epoch)
        if former is not None and former.users == 0:
            await former.peer.close()
        return member.link

    async def _describe(self, member: _Member, holder: HolderRef) -> InstanceInfo:
        # One answer for all failures: whoever chose the address learns nothing of what is there.
        unreachable = TransferFailed(f"encoder {holder.instance_id!r} is not reachable from here")
        backoff = self._backoffs.get(holder.address)
        if backoff is not None and self._clock() < backoff.until_s:
            raise unreachable
        try:
            async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
                info = await member.stub.describe()
        except (TriptychError, TimeoutError) as error:
            logger.info("encoder %s did not identify itself: %s", holder.instance_id, error)
            if isinstance(error, (TimeoutError, DeadlineExceeded)):
                self._back_off(holder.address)
            raise unreachable from None
        self._backoffs.pop(holder.address, None)
        return info

    def _back_off(self, address: str) -> None:
        former = self._backoffs.pop(address, None)
        failures = 1 if former is None else former.failures + 1
        delay_s = min(_FIRST_BACKOFF_S * 2 ** min(failures - 1, 30), _LONGEST_BACKOFF_S)
        self._backoffs[address] = _Backoff(failures, self._clock() + delay_s)
        if len(self._backoffs) > _MAX_BACKOFFS:
            del self._backoffs[next(iter(self._backoffs))]


async def _close(member: _Member) -> None:
    link, member.link = member.link, None
    if link is not None and link.users == 0:
        await link.peer.close()
    await member.stub.close()
