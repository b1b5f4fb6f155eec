"""The holder's side of the TCP backend: serves reads of the arena to readers that hold a lease.

Callbacks only, no task per connection. Bounded are connections, queued requests per connection, bytes in the write
buffer, bytes sent per turn of the event loop, the time of a read, and idle time.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from triptych.ports import Arena, LeaseCheck
from triptych.transport.arena import PROBE_NBYTES
from triptych.transport.tcp_wire import NO_LEASE, REPLY, REPLY_MAGIC, REQUEST, Read, Status

_CHUNK_NBYTES = 1 << 19
_TURN_NBYTES = 1 << 22
_GREETING_S = 10.0
"""Time in which a new connection must send its first request."""


@dataclass(frozen=True, slots=True)
class TcpLimits:
    max_pull_s: float
    """Time limit of one read, on both sides."""
    max_connections: int = 1024
    max_requests_in_line: int = 128
    """Per connection."""
    idle_s: float = 600.0
    """Idle time after which a connection is closed; the reader opens another when it needs one."""


class Serving(asyncio.Protocol):
    """One connection of a reader. ``gone`` is set when it has closed."""

    def __init__(
        self, arena: Arena, check: LeaseCheck, limits: TcpLimits, *, begun: Callable[["Serving"], None]
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
        """When the current reply began, or the connection became idle."""
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
