"""HTTP connection: uvicorn's protocol with limits on a request's head, and one format for every refusal."""

import asyncio
import socket
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from triptych.errors import HeadersTooLarge, InvalidRequest, Overloaded, TriptychError, UriTooLong
from triptych.runtime.clock import monotonic

from .half_closed import HalfClosed

MAX_HEAD_BYTES = 64 << 10
"""Limit for a request's head, and for its trailers, chunk sizes and chunk extensions together."""
MAX_HEADERS = 100
"""Trailers included."""
MAX_URI_BYTES = 8 << 10
MAX_PIPELINED = 16
"""Limit on the requests of one connection that wait for an earlier answer."""
SPARE_CONNECTIONS = 64
"""Connections above the setting, so that health checks are still answered."""
_CHUNK_BYTES = 16
"""Framing bytes allowed per chunk of a body without being counted."""
_LINGER_S = 2.0
"""Time that data from a refused client is read and dropped, seconds. Closing at once could reset the connection before
the client reads the answer.
"""
REFUSAL = "refusal"
"""Key in ``scope["state"]`` of the error with which the application must refuse the request."""
ARRIVED_S = "arrived_s"
"""Key in ``scope["state"]`` of the time at which the request's head was there to be read, which may be long before it was."""
_TCP_INFO_BYTES = 60
_LAST_DATA_AT = 52
"""Offset in ``tcp_info`` of the milliseconds since the kernel received the last data (linux/tcp.h)."""


class BoundedHttp(HttpToolsProtocol):
    """Limits what a connection may cost before its request is known.

    - A connection without a complete head within ``head_timeout_s`` seconds is closed. The time counts from the opening
      of the connection, and later from the first byte of a head; before that byte ``timeout_keep_alive`` seconds may
      pass. (uvicorn's own timer stops at the first byte and does not cover the first request.) A client that
      does not read its last answer, or the end of one that was cut short, is cut off. One that still sends the body of
      an answered request then gets the end of the stream, and as much time again until the connection is closed.
    - A client that closes its sending side only, after its request, gets its answer. One that has closed the connection
      looks the same until something is written to it, so the connection is probed (``HalfClosed``).
    - An oversized head, invalid HTTP, or one connection too many is refused after the answers to earlier requests. The
      refusal is passed to the application as a request of its own, with the error in ``state["refusal"]``.
    """

    max_connections = 4096
    head_timeout_s = 20.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._is_idle = False
        """The timer counts until the first byte of the next request."""
        self._has_begun = False
        """A request has begun to arrive and is not complete."""
        self._half_closed: HalfClosed | None = None
        self._running: RequestResponseCycle | None = None
        self._in_head = True
        self._counted = 0
        """Bytes of the head so far; within a body, its framing bytes."""
        self._fields = 0
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections + SPARE_CONNECTIONS:
            self._refuse(Overloaded(f"{self.max_connections} connections are open, which is the limit"))
        else:
            self._close_after(self.head_timeout_s)

    def shutdown(self) -> None:
        """Close if no answer is due, else after it."""
        is_idle = not (self.transport.is_closing() or self.transport.get_write_buffer_size())
        super().shutdown()
        if is_idle and self.transport.is_closing():  # a client that is idle may not answer TLS's close_notify
            self._stop_timer()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._half_closed is not None:
            self._half_closed.end()
        waiting, self.pipeline = self.pipeline, deque()
        for cycle in (self._running, *(cycle for cycle, _ in waiting)):
            if cycle is not None and not cycle.response_complete:  # uvicorn notifies only the newest cycle
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        while data and not self._refused:
            piece = data[: MAX_HEAD_BYTES + 1 - self._counted] if self._in_head else data
            data = data[len(piece) :]
            self._counted += len(piece)
            self._feed(piece)

    def _feed(self, piece: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback below raised
            self._refuse(cause if isinstance(cause, TriptychError) else InvalidRequest("this is not valid HTTP/1.1"))
        else:
            self._counted = max(0, self._counted)
            if self._counted > MAX_HEAD_BYTES:
                self._refuse(HeadersTooLarge(f"headers or trailers have more than {MAX_HEAD_BYTES} bytes"))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its Upgrade header: the parser skips the body of an upgrade request."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(InvalidRequest("this server is not a proxy"))
            return
        line = b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())
        fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        self.parser = httptools.HttpRequestParser(self)
        self._counted = 0
        self._feed(line + fields + b"\r\n" + rest)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for an answer."""
        if self.pipeline and self.cycle.more_body and not self._refused:
            self._drop_newest()
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.transport.is_closing():
            return False
        if self.scheme == "https" or (cycle.more_body and not self._refused):
            return False  # asyncio's TLS has no half-closed connections; a request without its end gets no answer
        cycle.keep_alive = False
        self._half_closed = HalfClosed(self.loop, self.transport, lambda: self._running)
        return True

    def _drop_newest(self) -> None:
        """Forget a request that has no end. Those before it are answered."""
        self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment]
        self._in_head, self._has_begun = True, False

    def on_message_begin(self) -> None:
        self._fields = 0
        self._has_begun = True
        if self._is_idle:
            self._close_after(self.head_timeout_s)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URI_BYTES:
            raise UriTooLong(f"the URI has more than {MAX_URI_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > MAX_HEADERS:
            raise HeadersTooLarge(f"there are more than {MAX_HEADERS} headers")
        if self._in_head:  # trailers are ignored: the application has already read the headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts != 1 and self.parser.get_http_version() != "1.0":
            raise InvalidRequest(f"a request needs one Host header, this one has {hosts or 'none'}")
        if self.parser.should_upgrade():
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise Overloaded(f"{MAX_PIPELINED} requests of this connection are waiting, which is the limit")
        self.scope["state"][ARRIVED_S] = monotonic() - self._waited_s()
        super().on_headers_complete()
        self._stop_timer()
        self._in_head, self._counted = False, 0

    def _waited_s(self) -> float:
        """Seconds for which the last data has waited to be read; 0 where the kernel does not say."""
        if sys.platform != "linux":
            return 0.0
        try:
            info = self.transport.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES
            )
        except OSError:  # the client has reset the connection
            return 0.0
        return int.from_bytes(info[_LAST_DATA_AT : _LAST_DATA_AT + 4], sys.byteorder) / 1000

    def on_chunk_header(self) -> None:
        self._counted -= _CHUNK_BYTES

    def on_body(self, body: bytes) -> None:
        self._counted -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head, self._counted, self._has_begun = True, 0, False
        super().on_message_complete()
        if self.cycle.response_complete and self._timer is not None:
            self._await_next()

    # --- answers and refusals ----------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.transport is self.transport:
            cycle.transport = _Closing(self, cycle)  # type: ignore[assignment]
        if cycle.scope["http_version"] == "1.0":
            cycle.send = partial(_send_without_chunks, cycle, cycle.send)  # type: ignore[method-assign, arg-type]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if not self.pipeline and not self._refused:
            self._await_next()
        super().on_response_complete()

    def _await_next(self) -> None:
        """Give the client time to read its answer and send its request to the end, and then time to begin the next one."""
        if self.transport.get_write_buffer_size():
            self._stop_timer()
            self._timer = self.loop.call_later(self.head_timeout_s, self._close_unread)
        elif self._has_begun:
            self._close_after(self.head_timeout_s)
        else:
            self._close_after(self.timeout_keep_alive)
            self._is_idle = True

    def _close_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self._await_next()

    def _refuse(self, error: TriptychError) -> None:
        """Stop reading. Answer the request whose body is at fault, or add a request that is answered with the error."""
        self._refused = True
        self._stop_timer()
        if not self._in_head:
            self.cycle.transport = _Lingering(self)  # type: ignore[assignment]
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.linger()
            self.cycle.scope["state"][REFUSAL] = error
            self.cycle.message_event.set()
            return
        super().on_message_begin()
        state = {**self.app_state, REFUSAL: error}
        self.scope |= {"method": "?", "path": "", "raw_path": b"", "query_string": b"", "state": state}
        cycle = RequestResponseCycle(
            scope=self.scope,
            transport=_Lingering(self),  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=self.on_response_complete,
        )
        if self.cycle is None or self.cycle.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.pipeline.appendleft((cycle, self.app))
        self.cycle = cycle

    def drop_rest(self) -> None:
        """Ignore what is left of an answered request and close without losing the answer."""
        self._refused = True
        self._half_close(max(_LINGER_S, self.head_timeout_s))

    def close_written(self) -> None:
        """Close when the client has read what is written, or after ``head_timeout_s`` seconds."""
        if not self.transport.is_closing():
            self.transport.close()
            self._stop_timer()
            self._timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def linger(self) -> None:
        """Close when the client closes, or after ``_LINGER_S``."""
        self._half_close(_LINGER_S)

    def _half_close(self, seconds: float) -> None:
        if not self.transport.is_closing():
            with suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()
            self._close_after(seconds)

    def _close_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_idle = False

    def _close(self) -> None:
        if not (self._in_head or self._refused):
            self.drop_rest()
        elif self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()


async def _send_without_chunks(cycle: RequestResponseCycle, send: Send, message: Message) -> None:
    """Send part of an answer to HTTP/1.0, which has no chunks: without a length it ends with the connection."""
    if message["type"] == "http.response.start":
        if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
            cycle.chunked_encoding = False
    elif message["type"] == "http.response.body" and not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


class _Lingering:
    """A connection's transport, reduced to what an answer needs, that closes without losing the answer."""

    def __init__(self, protocol: BoundedHttp) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.linger()


class _Closing(_Lingering):
    """Lingers while the client still sends the body of an answered request; otherwise closes at once."""

    def __init__(self, protocol: BoundedHttp, cycle: RequestResponseCycle) -> None:
        super().__init__(protocol)
        self._cycle = cycle

    def close(self) -> None:
        if self._cycle.more_body and self._cycle.response_complete:
            self._protocol.drop_rest()
        else:
            self._protocol.close_written()
