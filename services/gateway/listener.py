"""The gateway's port: clients are accepted, and the number and time of their TLS handshakes bounded."""

import asyncio
import socket
import ssl
from collections.abc import Callable

from triptych.runtime.listening import Acceptor


class Listener:
    """Accepts clients from construction until ``close``, all that wait at once, and gives each a protocol.

    By itself uvloop accepts one in each round of its event loop: clients of a busy gateway would wait in the kernel's queue, unseen,
    until they give up. And a handshake that does not go on would count towards no limit for a minute.
    """

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_s: float,
        most_handshakes: int,
    ) -> None:
        """A handshake has ``handshake_s`` seconds. One above ``most_handshakes`` ends the oldest: those of clients that mean it are
        over soon.
        """
        self._protocol = protocol
        self._tls = tls
        self._handshake_s = None if tls is None else handshake_s
        self._most = most_handshakes
        self._loop = asyncio.get_running_loop()
        self._beginning: dict[asyncio.Task[None], None] = {}
        """The oldest first. Apart from uvicorn's own tasks, for which it would wait at the end."""
        self._acceptor = Acceptor(listening, self._accepted, client="client")

    def close(self) -> None:
        self._acceptor.close()
        for task in self._beginning:
            task.cancel()

    def _accepted(self, connection: socket.socket) -> None:
        if self._tls is not None and len(self._beginning) >= self._most:
            oldest = next(iter(self._beginning))
            del self._beginning[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._begin(connection))
        self._beginning[task] = None
        task.add_done_callback(lambda ended: self._ended(ended, connection))

    async def _begin(self, connection: socket.socket) -> None:
        """Returns once the protocol has its connection, which is after the handshake."""
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )
        except OSError:  # it is closed again, or its handshake failed
            connection.close()

    def _ended(self, task: asyncio.Task[None], connection: socket.socket) -> None:
        self._beginning.pop(task, None)
        if task.cancelled():  # perhaps before it began
            connection.close()
