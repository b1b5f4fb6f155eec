"""Holder's side of the shared-memory backend: gives the arena's descriptor to readers of the same user and host.

A reader connects to a socket in the abstract namespace, so no file can be left behind. It sends the offer's nonce and
receives the arena's descriptor. The connection then stays open and silent. When it closes, the reader knows that the
holder is gone, which the mapped memory itself would not show.
"""

import asyncio
import hmac
import os
import socket
from dataclasses import dataclass
from secrets import token_bytes
from struct import Struct
from struct import error as StructError  # noqa: N812 - the module calls its exception "error"

from triptych.domain.instance import TransportOffer
from triptych.errors import TransferFailed
from triptych.policy.transport import SHM
from triptych.runtime.listening import Acceptor
from triptych.transport.arena import PROBE_NBYTES, HostArena, probed_nbytes

NONCE_NBYTES = 16
_VERSION = 1
_OFFER = Struct(f"<B{PROBE_NBYTES}s{NONCE_NBYTES}s{NONCE_NBYTES}s")
_CREDENTIALS = Struct("iII")
_MAX_READERS = 1024
_GREETING_S = 10.0
"""Time in which a new connection must send the nonce."""


@dataclass(frozen=True, slots=True)
class ShmOffer:
    """The holder's probe, its socket's random name, and the nonce that grants access."""

    probe: bytes
    name: bytes
    nonce: bytes

    @property
    def address(self) -> bytes:
        return b"\0triptych-" + self.name.hex().encode()

    def pack(self) -> bytes:
        return _OFFER.pack(_VERSION, self.probe, self.name, self.nonce)

    @classmethod
    def parse(cls, offer: TransportOffer) -> "ShmOffer":
        """Parse a peer's metadata. Raises TransferFailed when it is malformed."""
        try:
            version, probe, name, nonce = _OFFER.unpack(offer.metadata)
        except StructError:
            raise TransferFailed("the holder's shared-memory offer is malformed") from None
        if offer.backend != SHM or version != _VERSION or probed_nbytes(probe) is None:
            raise TransferFailed("the holder's shared-memory offer is malformed")
        return cls(probe, name, nonce)


def same_user(connection: socket.socket) -> bool:
    """Whether the peer process runs as this user, according to the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


class ShmListener:
    """Listens from construction, in the event loop, until ``close``."""

    def __init__(self, arena: HostArena) -> None:
        """Raises OSError when the socket cannot be made."""
        self._arena = arena
        self._loop = asyncio.get_running_loop()
        self.offer = ShmOffer(arena.probe, token_bytes(NONCE_NBYTES), token_bytes(NONCE_NBYTES))
        self._greeting: dict[socket.socket, asyncio.TimerHandle] = {}
        """Connections that have not sent the nonce yet."""
        self._readers: set[socket.socket] = set()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(self.offer.address)
        listening.listen(128)
        self._acceptor = Acceptor(listening, self._accepted, client="reader")

    @property
    def connections(self) -> int:
        return len(self._greeting) + len(self._readers)

    def _accepted(self, connection: socket.socket) -> None:
        if self.connections >= _MAX_READERS or not same_user(connection):
            connection.close()
            return
        self._greeting[connection] = self._loop.call_later(_GREETING_S, self._hang_up, connection)
        self._loop.add_reader(connection, self._greeted, connection)

    def _greeted(self, connection: socket.socket) -> None:
        """The nonce arrives in one piece: it is shorter than any buffer."""
        try:
            shown = connection.recv(NONCE_NBYTES + 1)
            if hmac.compare_digest(shown, self.offer.nonce) and self._arena.fd is not None:
                socket.send_fds(connection, [self._arena.probe], [self._arena.fd])
                self._greeting.pop(connection).cancel()
                self._readers.add(connection)
                self._loop.add_reader(connection, self._hang_up, connection)
                return
        except OSError:
            pass
        self._hang_up(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        """The reader has left, or sent data, which no reader does."""
        timer = self._greeting.pop(connection, None)
        if timer is not None:
            timer.cancel()
        self._readers.discard(connection)
        self._loop.remove_reader(connection)
        connection.close()

    def close(self) -> None:
        """Readers notice at their next pull."""
        self._acceptor.close()
        for connection in [*self._greeting, *self._readers]:
            self._hang_up(connection)
