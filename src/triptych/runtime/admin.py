"""The admin port of a process: health, readiness, metrics, and what the service shows. Never expose it publicly.

A minimal HTTP server, since most services have no web framework: it reads one request line, answers, closes. It runs on
the process's event loop, so ``/health`` shows that the loop is alive.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl

from triptych.errors import Unavailable
from triptych.runtime.tasks import TaskScope

logger = logging.getLogger(__name__)

STARTING = "it is starting"
"""Fact that ``/ready`` says is missing until the process serves."""

_MAX_CONNECTIONS = 16
_MAX_HEAD_NBYTES = 16 << 10
_REQUEST_S = 5.0
_CUT = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ConnectionError, ValueError)
"""Errors of a client that sends a malformed or oversized request, or leaves."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: HTTPStatus
    content_type: str
    body: bytes

    @classmethod
    def json(cls, status: HTTPStatus, body: object) -> "Answer":
        return cls(status, "application/json", json.dumps(body).encode())


Query = Mapping[str, str]
"""Parameters that follow the path in an address; of several values of one name the last."""
Route = Callable[[Query], Awaitable[Answer]]


@asynccontextmanager
async def serve(host: str, port: int, routes: Mapping[str, Route]) -> AsyncGenerator[int]:
    """Answer GET and HEAD at ``routes``. Yields the port. Raises Unavailable when it is taken."""
    async with TaskScope("admin", limit=_MAX_CONNECTIONS) as connections:

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                connections.spawn(_serve_one(reader, writer, routes), name="connection")
            except RuntimeError:  # too many connections, or shutting down
                writer.transport.abort()

        try:
            server = await asyncio.start_server(connected, host, port, limit=_MAX_HEAD_NBYTES)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise Unavailable(f"cannot listen on admin port {port} of {host}: {reason}") from None
        try:
            bound: int = server.sockets[0].getsockname()[1]
            logger.info("admin port on http://%s:%d", host, bound)
            yield bound
        finally:
            server.close()


async def _serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, routes: Mapping[str, Route]) -> None:
    try:
        async with asyncio.timeout(_REQUEST_S):
            await _exchange(reader, writer, routes)
            writer.close()
            await writer.wait_closed()
    except _CUT:
        pass
    finally:
        writer.transport.abort()


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, routes: Mapping[str, Route]) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    path, _, query = target.partition("?")
    route = routes.get(path)
    if route is None:
        answer = Answer.json(HTTPStatus.NOT_FOUND, {"paths": sorted(routes)})
    elif method not in ("GET", "HEAD"):
        answer = Answer.json(HTTPStatus.METHOD_NOT_ALLOWED, {"methods": ["GET", "HEAD"]})
    else:
        try:
            answer = await route(dict(parse_qsl(query)))
        except Exception:  # report a defect, do not fail on it
            logger.exception("admin %s failed", target)
            answer = Answer.json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "see the log"})
    lines = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"content-type: {answer.content_type}",
        f"content-length: {len(answer.body)}",
        "connection: close",
        "",
        "",
    )
    writer.write("\r\n".join(lines).encode() + (b"" if method == "HEAD" else answer.body))
    await writer.drain()
