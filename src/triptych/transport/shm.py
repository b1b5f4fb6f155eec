"""Shared memory: a reader maps the holder's arena read-only, and a pull is one copy. One host and one user only.

As with NIXL the holder takes no part in a read and cannot check leases: generation and checksum protect a reader from a
recycled slot. Access is checked once, by user and nonce, when the arena is handed over.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from triptych.domain.embedding import Ticket
from triptych.domain.instance import TransportOffer
from triptych.errors import TransferFailed
from triptych.policy.transport import SHM
from triptych.transport.arena import PROBE_NBYTES, HostArena, probed_nbytes
from triptych.transport.shm_holder import ShmListener, ShmOffer, same_user
from triptych.transport.shm_map import ReadOnlyMap
from triptych.transport.slot import check_ticket

BACKEND = SHM

_INLINE_NBYTES = 8 << 20
"""Largest copy made in the event loop: the hand-over to a thread costs a fifth of copying 4 MB."""
_STEP_NBYTES = (1 << 20) + 4096
"""Bytes per step of a copy (0.05 to 0.2 ms), after which other tasks run and a cancelled copy ends."""
_COPY_THREADS = 4


class ShmTransport:
    """Transport of one instance: hands out its own arena, maps those of others."""

    def __init__(self, arena: HostArena, listener: ShmListener, *, machine: str, max_pull_s: float) -> None:
        """Use ``listen``."""
        self._arena = arena
        self._listener = listener
        self._machine = machine
        self._max_pull_s = max_pull_s
        self._threads = ThreadPoolExecutor(_COPY_THREADS, "shm")
        self._peers: set[ShmPeer] = set()
        self._closed = False

    @classmethod
    async def listen(cls, arena: HostArena, *, machine: str, max_pull_s: float) -> Self:
        """Offer ``arena`` to this host. Raises RuntimeError when the system has no sealed memory files."""
        if arena.fd is None:
            raise RuntimeError("shared memory needs sealed memory files (Linux 5.1)")
        try:
            listener = ShmListener(arena)
        except OSError as error:
            raise RuntimeError(f"the socket for shared memory could not be made ({error.strerror})") from error
        return cls(arena, listener, machine=machine, max_pull_s=max_pull_s)

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def arena(self) -> HostArena:
        return self._arena

    @property
    def connections(self) -> int:
        """Connected readers."""
        return self._listener.connections

    def offer(self) -> TransportOffer:
        return TransportOffer(BACKEND, self._machine, self._listener.offer.pack())

    async def connect(self, offer: TransportOffer) -> "ShmPeer":
        theirs = ShmOffer.parse(offer)
        self._check_open()
        connection, fd = await _greet(theirs)
        mapped = await self._map(connection, fd, probed_nbytes(theirs.probe) or 0)
        peer = ShmPeer(self._arena, self._threads, connection, mapped, self._max_pull_s, self._peers.discard)
        self._peers.add(peer)
        try:
            self._check_open()
            await self._prove(peer, theirs.probe)
        except BaseException:
            await peer.close()
            raise
        return peer

    async def _map(self, connection: socket.socket, fd: int, nbytes: int) -> ReadOnlyMap:
        if self._closed:
            _close(connection, [fd])
            self._check_open()
        mapping = asyncio.get_running_loop().run_in_executor(self._threads, ReadOnlyMap.take, fd, nbytes)
        try:
            return await asyncio.shield(mapping)
        except BaseException:
            connection.close()
            mapping.add_done_callback(_unmap)
            raise

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        """Always empty: a cancelled pull returns only after its copy has ended."""
        return ()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._listener.close()
            for peer in list(self._peers):
                await peer.close()
            self._threads.shutdown(wait=False)

    async def _prove(self, peer: "ShmPeer", probe: bytes) -> None:
        at = self._arena.take_scratch()
        try:
            await peer.read(0, at, PROBE_NBYTES)
            if self._arena.read(at, PROBE_NBYTES) != probe:
                raise TransferFailed("the holder's memory does not start with its probe")
        finally:
            self._arena.give_scratch(at)

    def _check_open(self) -> None:
        if self._closed:
            raise TransferFailed("the shared-memory transport is closed")


class ShmPeer:
    """A holder's arena, mapped."""

    def __init__(
        self,
        arena: HostArena,
        threads: ThreadPoolExecutor,
        connection: socket.socket,
        mapped: ReadOnlyMap,
        max_pull_s: float,
        closed: Callable[["ShmPeer"], None],
    ) -> None:
        self._arena = arena
        self._threads = threads
        self._connection = connection
        self._mapped = mapped
        self._max_pull_s = max_pull_s
        self._closing = threading.Event()
        self._copies: set[asyncio.Future[None]] = set()
        self._on_close = closed

    @property
    def backend(self) -> str:
        return BACKEND

    async def pull(self, ticket: Ticket, destination_offset: int) -> None:
        """Pull like ``Peer.pull``, without a question to the holder. Only ``slot.verify`` notices a lease that has
        ended.
        """
        check_ticket(ticket)
        nbytes = ticket.slot_nbytes
        if not self._arena.holds(destination_offset, nbytes):
            raise TransferFailed(f"{nbytes} bytes at {destination_offset} are not inside the own arena")
        if ticket.offset < 0 or ticket.offset + nbytes > self._mapped.nbytes:
            raise TransferFailed(f"{nbytes} bytes at {ticket.offset} are not inside the holder's arena")
        await self.read(ticket.offset, destination_offset, nbytes)

    async def read(self, offset: int, destination_offset: int, nbytes: int) -> None:
        """Copy, and check before and after that the holder is alive. Raises TransferFailed."""
        self._check_holder()
        to = self._arena.address + destination_offset
        if nbytes <= _INLINE_NBYTES:
            await self._copy_in_steps(to, offset, nbytes)
        else:
            await self._copy_in_thread(to, offset, nbytes)
        self._check_holder()

    async def _copy_in_steps(self, to: int, offset: int, nbytes: int) -> None:
        for at in range(0, nbytes, _STEP_NBYTES):
            if at > 0:
                await asyncio.sleep(0)
                self._check_holder()
            self._mapped.copy_to(to + at, offset + at, min(_STEP_NBYTES, nbytes - at))

    async def _copy_in_thread(self, to: int, offset: int, nbytes: int) -> None:
        given_up = threading.Event()

        def copy() -> None:
            for at in range(0, nbytes, _STEP_NBYTES):
                if given_up.is_set() or self._closing.is_set():
                    return
                self._mapped.copy_to(to + at, offset + at, min(_STEP_NBYTES, nbytes - at))

        copying = asyncio.get_running_loop().run_in_executor(self._threads, copy)
        self._copies.add(copying)
        copying.add_done_callback(self._copies.discard)
        try:
            async with asyncio.timeout(self._max_pull_s):
                await asyncio.shield(copying)
        except TimeoutError:
            raise TransferFailed(f"{nbytes} bytes were not copied within {self._max_pull_s} s") from None
        finally:
            given_up.set()
            await _ended(copying)

    def _check_holder(self) -> None:
        if self._closing.is_set():
            raise TransferFailed("the link to the holder is closed")
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            pass
        raise TransferFailed("the holder is gone")

    async def close(self) -> None:
        """Running pulls end with TransferFailed."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._connection.close()
        for copying in list(self._copies):
            await _ended(copying)
        self._mapped.close()
        self._on_close(self)


async def _greet(offer: ShmOffer) -> tuple[socket.socket, int]:
    """Connect to a holder and receive its arena's descriptor, which the caller closes. Raises TransferFailed."""
    loop = asyncio.get_running_loop()
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise TransferFailed(f"no connection to the holder can be made: {error.strerror}") from None
    connection.setblocking(False)
    fds: list[int] = []
    try:
        await loop.sock_connect(connection, offer.address)
        if same_user(connection):
            await loop.sock_sendall(connection, offer.nonce)
            await _readable(connection)
            greeting, fds, _, _ = socket.recv_fds(connection, PROBE_NBYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
            if len(fds) == 1 and greeting == offer.probe:
                return connection, fds[0]
    except OSError:
        _close(connection, fds)
        raise TransferFailed("the holder is not on this host") from None
    except BaseException:
        _close(connection, fds)
        raise
    _close(connection, fds)
    raise TransferFailed("the holder does not hand out its memory to this user")


def _close(connection: socket.socket, fds: list[int]) -> None:
    connection.close()
    for fd in fds:
        os.close(fd)


async def _readable(connection: socket.socket) -> None:
    """Wait for the first byte without reading it: the descriptor comes with it."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection, look)
    try:
        await ready
    finally:
        loop.remove_reader(connection)


async def _ended(copying: "asyncio.Future[None]") -> None:
    """Wait for the copy even when cancelled: it takes milliseconds, and memory is written until then."""
    cancelled = False
    while not copying.done():
        try:
            await asyncio.wait((copying,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def _unmap(mapping: "asyncio.Future[ReadOnlyMap]") -> None:
    if not mapping.cancelled() and mapping.exception() is None:
        mapping.result().close()
