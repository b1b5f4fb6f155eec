"""The reader's side of the TCP backend: the socket writes straight into the arena.

A cancelled or timed-out pull frees its destination at once: the rest of its reply is discarded, or the connection is
cut when nobody else waits on it. So nothing is written late.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from triptych.domain.embedding import LEASE_ID_NBYTES, LeaseId, Ticket
from triptych.errors import LeaseLost, TransferFailed
from triptych.policy.transport import TCP
from triptych.ports import Arena
from triptych.runtime.tls import INSTANCE, TlsIdentity
from triptych.transport.arena import PROBE_NBYTES, probed_nbytes
from triptych.transport.slot import check_ticket
from triptych.transport.tcp_wire import (
    NO_LEASE,
    REPLY,
    REPLY_MAGIC,
    TLS_HANDSHAKE_S,
    Read,
    Status,
    TcpOffer,
)

_LINKS = 2
"""Connections per holder; a second one lets small embeddings overtake a large one."""
_MAX_READS = 64
"""Concurrent reads per holder; further ones wait."""
_DISCARD_NBYTES = 1 << 18


class _LinkLostError(Exception):
    """The connection is gone."""


@dataclass(slots=True, eq=False)
class _PendingReply:
    """A pending reply. ``place`` is None once it is cancelled."""

    tag: int
    nbytes: int
    place: memoryview | None
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Link(asyncio.BufferedProtocol):
    """Connection to a holder."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(REPLY.size)
        self._discard: bytearray | None = None
        self._filled = 0
        """Received bytes of the current header, or of the current payload when ``_in_payload``."""
        self._in_payload = False
        self._pending: deque[_PendingReply] = deque()
        self._next_tag = 1
        self.used = False
        """Whether the connection has carried a whole reply."""
        self.closed = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def pending_nbytes(self) -> int:
        return sum(reply.nbytes for reply in self._pending)

    def request(self, lease_id: LeaseId, offset: int, place: memoryview) -> _PendingReply:
        """Send a request; its ``done`` is set once ``place`` is full. Raises _LinkLostError."""
        if self._transport is None or self._transport.is_closing():
            raise _LinkLostError
        reply = _PendingReply(self._next_tag, len(place), place)
        self._next_tag = self._next_tag % 0xFFFF_FFFF + 1
        self._pending.append(reply)
        self._transport.write(Read(reply.tag, lease_id, offset, len(place)).pack())
        return reply

    def cancel(self, reply: _PendingReply) -> None:
        """Cancel a reply. Nothing is written to its place after this returns."""
        reply.place = None
        reply.done.cancel()
        if self._pending and all(read.place is None for read in self._pending):
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature is asyncio's
        self._transport = None
        for reply in self._pending:
            reply.place = None
            if not reply.done.done():
                reply.done.set_exception(_LinkLostError())
        self._pending.clear()
        self.closed.set()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the signature is asyncio's
        """Never empty, or uvloop would close the connection."""
        if not self._in_payload:
            return memoryview(self._head)[self._filled :]
        reply = self._pending[0]
        if reply.place is not None:
            return reply.place[self._filled :]
        if self._discard is None:
            self._discard = bytearray(_DISCARD_NBYTES)
        return memoryview(self._discard)[: reply.nbytes - self._filled]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._in_payload:
            if self._filled == self._pending[0].nbytes:
                self._finish(None)
        elif self._filled == REPLY.size:
            self._head_received()

    def eof_received(self) -> bool:
        return False

    def _head_received(self) -> None:
        magic, tag, status, nbytes = REPLY.unpack(self._head)
        if magic != REPLY_MAGIC or not self._pending or tag != self._pending[0].tag:
            self.abort()
        elif status == Status.OK and nbytes == self._pending[0].nbytes:
            self._filled, self._in_payload = 0, True
        elif status == Status.LEASE_LOST and nbytes == 0:
            self._finish(LeaseLost("the holder says that the lease is over"))
        elif status == Status.OUT_OF_RANGE and nbytes == 0:
            self._finish(TransferFailed("the holder says that the slot is not inside its arena"))
        else:
            self.abort()

    def _finish(self, error: Exception | None) -> None:
        reply = self._pending.popleft()
        self._filled, self._in_payload, self.used = 0, False, True
        reply.place = None
        if reply.done.done():
            return
        if error is None:
            reply.done.set_result(None)
        else:
            reply.done.set_exception(error)


class TcpPeer:
    """A holder, read over a few connections that are opened on demand."""

    def __init__(
        self,
        arena: Arena,
        offer: TcpOffer,
        *,
        max_pull_s: float,
        tls: TlsIdentity | None,
        closed: Callable[["TcpPeer"], None],
    ) -> None:
        self._arena = arena
        self._offer = offer
        self._nbytes = probed_nbytes(offer.probe) or 0
        self._max_pull_s = max_pull_s
        self._tls = tls
        self._on_close = closed
        self._links: list[Link] = []
        self._opening = asyncio.Lock()
        self._room = asyncio.Semaphore(_MAX_READS)
        self._closed = False

    @property
    def backend(self) -> str:
        return TCP

    async def prove(self) -> None:
        """Read the holder's probe. Raises TransferFailed when it differs from the one offered."""
        at = self._arena.take_scratch()
        try:
            await self._read(NO_LEASE, 0, at, PROBE_NBYTES)
            if self._arena.read(at, PROBE_NBYTES) != self._offer.probe:
                raise TransferFailed("the holder's memory does not start with its probe: it was restarted")
        finally:
            self._arena.give_scratch(at)

    async def pull(self, ticket: Ticket, destination_offset: int) -> None:
        check_ticket(ticket)
        nbytes = ticket.slot_nbytes
        if len(ticket.lease_id) != LEASE_ID_NBYTES or ticket.lease_id == NO_LEASE:
            raise TransferFailed(f"a lease id has {LEASE_ID_NBYTES} random bytes")
        if not self._arena.holds(destination_offset, nbytes):
            raise TransferFailed(f"{nbytes} bytes at {destination_offset} are not inside the own arena")
        if ticket.offset < 0 or ticket.offset + nbytes > self._nbytes:
            raise TransferFailed(f"{nbytes} bytes at {ticket.offset} are not inside the holder's arena")
        await self._read(ticket.lease_id, ticket.offset, destination_offset, nbytes)

    async def close(self) -> None:
        """Cut the connections: running pulls fail with TransferFailed."""
        self._closed = True
        links, self._links = self._links, []
        for link in links:
            link.abort()
        try:
            for link in links:
                await link.closed.wait()
        finally:
            self._on_close(self)

    async def _read(self, lease_id: LeaseId, offset: int, destination_offset: int, nbytes: int) -> None:
        window = self._arena.window(destination_offset, nbytes)
        if window is not None:
            await self._read_into(window, lease_id, offset)
        else:
            # A socket cannot write to device memory: stage the bytes in host memory.
            staged = bytearray(nbytes)
            await self._read_into(memoryview(staged), lease_id, offset)
            self._arena.write(destination_offset, staged)

    async def _read_into(self, place: memoryview, lease_id: LeaseId, offset: int) -> None:
        try:
            async with asyncio.timeout(self._max_pull_s), self._room:
                link = await self._link()
                # The holder may just have closed an idle link: try once more.
                worn = link.used
                try:
                    await self._read_over(link, lease_id, offset, place)
                except _LinkLostError:
                    if not worn:
                        raise
                    await self._read_over(await self._link(), lease_id, offset, place)
        except TimeoutError:
            raise TransferFailed(f"{len(place)} bytes did not arrive within {self._max_pull_s} s") from None
        except _LinkLostError:
            raise TransferFailed("the connection to the holder broke") from None

    @staticmethod
    async def _read_over(link: Link, lease_id: LeaseId, offset: int, place: memoryview) -> None:
        reply = link.request(lease_id, offset, place)
        try:
            await reply.done
        except asyncio.CancelledError:
            link.cancel(reply)
            raise

    async def _link(self) -> Link:
        """The connection with the fewest pending bytes; a further one when all are busy."""
        async with self._opening:
            self._links = [link for link in self._links if link.alive]
            least = min(self._links, key=lambda link: link.pending_nbytes, default=None)
            if least is not None and (least.pending_nbytes == 0 or len(self._links) >= _LINKS):
                return least
            self._check_open()
            try:
                link = await self._connect()
            except ssl.SSLError as error:  # an OSError, too, but one that the operator can fix
                reason = error.reason or "no reason given"
                raise TransferFailed(f"the TLS handshake with the holder failed: {reason}") from None
            except OSError:
                raise TransferFailed("the holder does not take connections") from None
            if self._closed:
                link.abort()
                await link.closed.wait()
            self._check_open()
            self._links.append(link)
            return link

    async def _connect(self) -> Link:
        loop, host, port = asyncio.get_running_loop(), self._offer.host, self._offer.port
        if self._tls is None:
            _, link = await loop.create_connection(Link, host, port)
        else:
            _, link = await loop.create_connection(
                Link,
                host,
                port,
                ssl=self._tls.calling(INSTANCE),
                ssl_handshake_timeout=TLS_HANDSHAKE_S,
            )
        return link

    def _check_open(self) -> None:
        if self._closed:
            raise TransferFailed("the link to the holder is closed")
