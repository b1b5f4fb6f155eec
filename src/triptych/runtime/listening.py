"""Listening sockets: whether a port is free, and accepting connections in the event loop."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from triptych.runtime.logs import BoundedWarnings

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Connections that are accepted in one round of the event loop, at most."""
_AGAIN_S = 1.0
"""Pause after a connection could not be accepted for lack of resources."""
_NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SOCKET_IS_DEAD = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})
"""Errors of accept(2) after which it accepts nothing more. Those in neither set are of the one connection."""


def listen_error(host: str, port: int) -> OSError | None:
    """The error that listening on the port would give now, if any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: ignores old connections
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


class Acceptor:
    """Accepts the connections of a listening socket, all that wait at once, from construction until ``close``.

    For lack of files or memory it pauses: the socket stays readable then, which would keep the event loop busy.
    """

    def __init__(
        self,
        listening: socket.socket,
        accepted: Callable[[socket.socket], None],
        *,
        client: str,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """``accepted`` is given each connection. ``client`` names what connects, in the log. ``on_failure`` is called when the
        socket can accept nothing more.
        """
        self._socket = listening
        self._socket.setblocking(False)
        self._accepted = accepted
        self._client = client
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._warnings = BoundedWarnings(logger)
        self._again: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Close the socket, too. Those that wait in the kernel's queue are reset."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._not_accepted(error)
                return
            connection.setblocking(False)
            self._accepted(connection)

    def _not_accepted(self, error: OSError) -> None:
        if error.errno in _SOCKET_IS_DEAD:
            logger.error("%ss cannot connect any more: %s", self._client, error)
            self._loop.remove_reader(self._socket)
            self._on_failure()
        elif error.errno in _NO_RESOURCES:
            self._warnings.warn(f"{self._client}s cannot connect: {error}")
            self._loop.remove_reader(self._socket)
            self._again = self._loop.call_later(_AGAIN_S, self._listen)
        else:
            self._warnings.warn(f"a {self._client} could not connect: {error}", kind="connection")
