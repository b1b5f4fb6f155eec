"""Holder's side of the TCP backend: serves reads of the arena to readers that hold a lease.

It works with callbacks only: a connection has a task until its TLS handshake has ended. Bounded are connections, queued
requests per connection, bytes in the write buffer, and bytes sent per turn of the event loop. The time of a read and
idle time are bounded as well.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from triptych.ports import Arena, LeaseCheck
from triptych.runtime.listening import Acceptor
from triptych.runtime.logs import BoundedWarnings
from triptych.runtime.tasks import TaskScope
from triptych.runtime.tls import INSTANCE, TlsIdentity
from triptych.transport.arena import PROBE_NBYTES
from triptych.transport.tcp_wire import NO_LEASE, REPLY, REPLY_MAGIC, REQUEST, TLS_HANDSHAKE_S, Read, Status

logger = logging.getLogger(__name__)

_CHUNK_NBYTES = 1 << 19
_TURN_NBYTES = 1 << 22
_GREETING_S = 10.0
"""Time in which a new connection must send its first request."""

OnFailure = Callable[[str], None]
"""Callback with the name of what cannot go on."""


@dataclass(frozen=True, slots=True)
class TcpLimits:
    max_pull_s: float
    """Time limit of one read, on both sides."""
    max_connections: int = 1024
    """Most connections of readers, those included whose TLS handshake has not ended."""
    max_requests_in_line: int = 128
    """Per connection."""
    idle_s: float = 600.0
    """Idle time after which a connection is closed; the reader opens another when it needs one."""


class TcpListener:
    """Accepts readers on a bound socket, in the event loop, from construction until ``close``.

    ``on_failure`` is called when the socket can accept nothing more; connected readers are still served.
    """

    def __init__(
        self,
        bound: socket.socket,
        arena: Arena,
        check: LeaseCheck,
        limits: TcpLimits,
        tls: TlsIdentity | None,
        *,
        on_failure: OnFailure,
    ) -> None:
        self._arena = arena
        self._check = check
        self._limits = limits
        self._encryption = None if tls is None else tls.listening(INSTANCE)
        self._loop = asyncio.get_running_loop()
        self._scope = TaskScope("tcp")
        self._beginning: dict[ReaderConnection, socket.socket] = {}
        """Connections before the end of their TLS handshake. They count in the limit: each has buffers."""
        self._serving: set[ReaderConnection] = set()
        self._warnings = BoundedWarnings(logger)
        self._closed = False
        self._acceptor = Acceptor(
            bound, self._accepted, client="reader", on_failure=lambda: on_failure("the listening socket of tcp")
        )

    @property
    def connections(self) -> int:
        """Connected readers."""
        return len(self._serving)

    async def close(self) -> None:
        """Safe to cancel."""
        if not self._closed:
            self._closed = True
            self._acceptor.close()
        for serving in self._serving:
            serving.abort()
        await self._scope.close()
        for connection in self._beginning.values():  # their tasks were cancelled before they began
            connection.close()
        if self._serving:
            await asyncio.wait([serving.gone for serving in self._serving])

    def _accepted(self, connection: socket.socket) -> None:
        if len(self._beginning) + len(self._serving) >= self._limits.max_connections:
            connection.close()
            limit = self._limits.max_connections
            self._warnings.warn(f"a reader was turned away: {limit} are connected, which is the limit", kind="limit")
            return
        # Asyncio sets it for sockets made with IPPROTO_TCP only. Without it, replies wait for acknowledgements of 40 ms.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serving = ReaderConnection(self._arena, self._check, self._limits, begun=self._begun)
        self._beginning[serving] = connection
        self._scope.spawn(self._begin(serving, connection), name="handshake")

    async def _begin(self, serving: "ReaderConnection", connection: socket.socket) -> None:
        timeout_s = None if self._encryption is None else TLS_HANDSHAKE_S
        try:
            await self._loop.connect_accepted_socket(
                lambda: serving, connection, ssl=self._encryption, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:
            logger.debug("a reader did not connect: %s", error)
        finally:
            self._beginning.pop(serving, None)

    def _begun(self, serving: "ReaderConnection") -> None:
        """The handshake may end after ``close``."""
        self._beginning.pop(serving, None)
        if self._closed:
            serving.abort()
            return
        self._serving.add(serving)
        serving.gone.add_done_callback(lambda _: self._serving.discard(serving))


class ReaderConnection(asyncio.Protocol):
    """Connection of a reader. ``gone`` is set when it has closed."""

    def __init__(
        self, arena: Arena, check: LeaseCheck, limits: TcpLimits, *, begun: Callable[["ReaderConnection"], None]
    ) -> None:
        self._begun = begun
        self._arena = arena
        self._check = check
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._line: deque[Read] = deque()
        self._at = 0
        """Arena offset of the next bytes to send."""
        self._unsent = 0
        """Unsent bytes of the current reply."""
        self._paused = False
        self._continues = False
        self._since_s = self._loop.time()
        """Time when the current reply began, or the connection became idle."""
        self._greeted = False
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it
        self._transport.set_write_buffer_limits(high=_CHUNK_NBYTES)
        self._watch_time()
        self._begun(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature is asyncio's
        self._transport = None
        self._line.clear()
        self._unsent = 0
        if self._watch is not None:
            self._watch.cancel()
        self.gone.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._received += data
        whole = len(self._received) // REQUEST.size * REQUEST.size
        for at in range(0, whole, REQUEST.size):
            read = Read.parse(bytes(self._received[at : at + REQUEST.size]))
            if read is None or len(self._line) >= self._limits.max_requests_in_line:
                self.abort()
                return
            self._line.append(read)
        del self._received[:whole]
        if self._line:
            self._greeted = True
            self._send()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._note_idle()
        self._send()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _send(self) -> None:
        """Send while the reader keeps up, at most one turn's share."""
        sent = 0
        while self._unsent > 0 or self._line:
            if self._transport is None or self._transport.is_closing() or self._paused:
                return
            if sent >= _TURN_NBYTES:
                if not self._continues:
                    self._continues = True
                    self._loop.call_soon(self._resume)
                return
            if self._unsent == 0:
                self._begin(self._line.popleft())
                continue
            nbytes = min(self._unsent, _CHUNK_NBYTES)
            self._transport.write(self._arena.read(self._at, nbytes))
            self._at, self._unsent = self._at + nbytes, self._unsent - nbytes
            sent += nbytes
            self._note_idle()

    def _note_idle(self) -> None:
        """A reply counts as sent when the write buffer has drained: until then the arena may still be read."""
        if self._unsent == 0 and not self._paused:
            self._since_s = self._loop.time()

    def _resume(self) -> None:
        self._continues = False
        self._send()

    def _begin(self, read: Read) -> None:
        assert self._transport is not None  # noqa: S101 - narrows the type
        self._since_s = self._loop.time()
        status = self._judge(read)
        nbytes = read.nbytes if status is Status.OK else 0
        self._transport.write(REPLY.pack(REPLY_MAGIC, read.tag, status, nbytes))
        self._at, self._unsent = read.offset, nbytes

    def _judge(self, read: Read) -> Status:
        if read.lease_id == NO_LEASE:
            return Status.OK if (read.offset, read.nbytes) == (0, PROBE_NBYTES) else Status.LEASE_LOST
        if not self._arena.holds(read.offset, read.nbytes):
            return Status.OUT_OF_RANGE
        return Status.OK if self._check(read.lease_id, read.offset, read.nbytes) else Status.LEASE_LOST

    def _watch_time(self) -> None:
        """Drop a reader that is too slow, or idle for too long."""
        busy = self._unsent > 0 or self._paused
        limit_s = self._limits.max_pull_s if busy else self._limits.idle_s if self._greeted else _GREETING_S
        left_s = self._since_s + limit_s - self._loop.time()
        if left_s <= 0:
            self.abort()
        else:
            # A reply may begin on an idle connection: check again within the time limit of a read.
            self._watch = self._loop.call_later(min(left_s, self._limits.max_pull_s), self._watch_time)
