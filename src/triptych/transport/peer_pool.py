"""Connections of a reader to the holders that tickets name: opened on first use, shared, bounded, closed when idle."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from triptych.domain.embedding import HolderRef, LeaseId
from triptych.domain.instance import InstanceInfo, TransportOffer
from triptych.errors import Overloaded, TransferFailed, TriptychError
from triptych.ports import Clock, HolderStub, Peer

logger = logging.getLogger(__name__)

_DESCRIBE_TIMEOUT_S = 2.0
_IDLE_S = 600.0


@dataclass(slots=True)
class _Link:
    """A way into the memory of one incarnation of a holder."""

    peer: Peer
    instance_id: str
    epoch: int
    users: int = 0


@dataclass(frozen=True, slots=True)
class _Attempt:
    holder: HolderRef
    ended: asyncio.Future[None]
    """Raises what the attempt came to. It ends without a link, too, when whoever made it left."""


@dataclass(slots=True)
class _Member:
    stub: HolderStub
    used_s: float
    users: int = 0
    """Pulls and calls under way."""
    link: _Link | None = None
    attempt: _Attempt | None = None
    known: bool = False
    """It has answered before."""


class PeerPool:
    """One stub, and one link into memory, for each address; all who ask for a link meanwhile share one attempt.

    Addresses come with tickets, so nothing here trusts one: a holder has to say that it is the instance, in the epoch,
    that the ticket names, before its memory is connected to. An address that does not answer takes no place once it was
    tried. A holder that restarted gets a new link; who reads over the former one goes on. A link that failed is used
    no more; it is closed when its last user has left, never under those who still read over it.
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
        """``open_stub`` raises TransferFailed for an address that is not to be called.

        At most ``limit`` holders; one more takes the place of the one that was used least recently and is idle.
        ``own`` is the holder in this process: its instance id, its epoch, and itself, whatever address a ticket has.
        """
        self._open_stub = open_stub
        self._connect = connect
        self._limit = limit
        self._clock = clock
        self._own = own
        self._members: dict[str, _Member] = {}
        """By address, the one that was used least recently first."""

    def __len__(self) -> int:
        return len(self._members)

    def by_backend(self) -> dict[tuple[str, ...], int]:
        """How many links there are over each backend."""
        links = (member.link for member in self._members.values())
        return dict(Counter((link.peer.backend,) for link in links if link is not None))

    @asynccontextmanager
    async def use(self, holder: HolderRef) -> AsyncIterator[Peer]:
        """The link to this incarnation, for one read. Raises TransferFailed where there is none, Overloaded.

        A body that fails with TransferFailed, or is given up, has the next one who asks get a new link.
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
        """Give leases back. Raises what the holder's stub does, TransferFailed, Overloaded."""
        async with self._member(holder) as member:
            await member.stub.release(lease_ids)
            member.known = True

    async def close_idle(self) -> None:
        """Let go of holders that nobody has asked for in a long time."""
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
            if (link := _fitting(member.link, holder)) is not None:
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
            ended.exception()  # it may be that nobody else waits
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
        former, member.link = member.link, _Link(await self._connect(info.offers), info.instance_id, info.epoch)
        if former is not None and former.users == 0:
            await former.peer.close()
        return member.link

    async def _describe(self, member: _Member, holder: HolderRef) -> InstanceInfo:
        try:
            async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
                return await member.stub.describe()
        except (TriptychError, TimeoutError) as error:
            # One answer for whatever went wrong: who chose the address learns no more of what is there.
            logger.info("encoder %s does not say who it is: %s", holder.instance_id, error)
            raise TransferFailed(f"encoder {holder.instance_id!r} is not reachable from here") from None


def _fitting(link: _Link | None, holder: HolderRef) -> _Link | None:
    fits = link is not None and (link.instance_id, link.epoch) == (holder.instance_id, holder.epoch)
    return link if fits else None


async def _close(member: _Member) -> None:
    link, member.link = member.link, None
    if link is not None and link.users == 0:
        await link.peer.close()
    await member.stub.close()
