"""HTTP on one connection: uvicorn's protocol, with a bound on how long a connection may wait for a request's head."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection that brings no whole head of a request within ``timeout_keep_alive`` seconds.

    That is uvicorn's name for it, and what each connection finds in uvicorn's configuration: ``app.py`` puts the setting
    ``head_timeout_s`` there. The seconds count from when the connection is opened, and from the end of each answer: a
    client that sends nothing, a head byte by byte, or the rest of a body that was refused, holds a connection no longer
    than that. uvicorn itself forgets its timer at the first byte, and has none before. One that does not take its last
    answer is cut off.
    """

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self._wait_for_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        transport: Any = self.transport
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            transport.close()
