"""Half-closed connections: the client sends nothing more, and either waits for its answer or has left."""

import asyncio
import socket
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CHECK_S = 0.025
"""Interval of the checks of a connection, seconds; the first is as long after its end."""
_PROBE_S = 10.0
"""Time between probes."""
_UNPROBED_S = 2.0
"""Longest wait for an answer that cannot be probed before it begins, to HTTP/1.0, seconds."""
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Ignored by clients that did not ask for it (RFC 9110, 15.2.1)."""
FILLER = "filler"
"""Key in ``scope["state"]`` of bytes without a meaning, which may be written between the pieces of a streamed answer."""


class HalfClosed:
    """Cuts a half-closed connection when its client has left, until ``end``.

    To a client that has left, writing is answered with a reset. So while an answer is due, the connection is probed with
    bytes that do not change it. Nothing else tells: TCP's keep-alive probes are acknowledged after the socket is closed,
    and ``TCP_INFO`` shows the same state. ``running`` returns the request that is being answered.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        running: Callable[[], RequestResponseCycle | None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._running = running
        self._probe_at_s = loop.time()
        self._unprobed_until_s = self._probe_at_s + _UNPROBED_S
        self._timer = loop.call_later(_CHECK_S, self._check)

    def end(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        running = self._running()
        if running is None or self._transport.is_closing():
            return
        now_s, filler = self._loop.time(), _filler(running)
        is_reset = self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        is_overdue = not (filler or running.response_started) and now_s >= self._unprobed_until_s
        if is_reset or is_overdue:
            self._transport.abort()
            return
        if filler and now_s >= self._probe_at_s and not self._transport.get_write_buffer_size():
            self._transport.write(filler)
            self._probe_at_s = now_s + _PROBE_S
        self._timer = self._loop.call_later(_CHECK_S, self._check)


def _filler(cycle: RequestResponseCycle) -> bytes:
    """Bytes that may be written now without a change of the answer; empty if nothing may."""
    if cycle.response_complete:
        return b""
    if not cycle.response_started:
        return _INTERIM if cycle.scope["http_version"] != "1.0" else b""
    filler: bytes = cycle.scope["state"].get(FILLER, b"")
    return b"%x\r\n%b\r\n" % (len(filler), filler) if filler and cycle.chunked_encoding else filler
