"""The gateway in this process, called by ASGI without sockets, so that it works under virtual time."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from triptych.ports import Clock, Offload, Router
from triptych.services.gateway.app import remote_media
from triptych.services.gateway.keys import KeyRing
from triptych.services.gateway.routes import create_app
from triptych.services.gateway.service import Gateway
from triptych.services.gateway.settings import GatewaySettings

PIECE_BYTES = 64 << 10
"""Size of a body's pieces, as from a socket."""


def make_gateway(router: Router, offload: Offload, clock: Clock, **settings: Any) -> Gateway:
    chosen = GatewaySettings(**settings)
    return Gateway(router, offload, chosen, lambda: 1.0, keys=KeyRing({}, clock), media=remote_media(chosen))


@dataclass
class Got:
    """The response received so far."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Door:
    """Sends requests to the application, as a server would."""

    def __init__(self, gateway: Gateway, clock: Clock) -> None:
        self._app = create_app(gateway, clock=clock)

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        request_id: str = "",
        leave: asyncio.Event | None = None,
        on_body: Callable[[Got], None] = lambda _: None,
    ) -> Got:
        """Returns when the application is done; the client disconnects when ``leave`` is set."""
        return await self._ask("POST", path, body, request_id, leave or asyncio.Event(), on_body)

    async def get(self, path: str) -> Got:
        return await self._ask("GET", path, b"", "", asyncio.Event(), lambda _: None)

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes,
        request_id: str,
        leave: asyncio.Event,
        on_body: Callable[[Got], None],
    ) -> Got:
        pieces = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)] or [b""]
        pieces.reverse()
        got = Got()

        async def receive() -> dict[str, Any]:
            if pieces:
                await asyncio.sleep(0)
                piece = pieces.pop()
                return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if leave.is_set():
                return  # like uvicorn
            if message["type"] == "http.response.start":
                got.status = message["status"]
            else:
                got.body.extend(message.get("body", b""))
                on_body(got)

        headers = [(b"x-request-id", request_id.encode())] if request_id else []
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": headers,
            "query_string": b"",
            "root_path": "",
            "client": ("127.0.0.1", 1),
        }
        await self._app(scope, receive, send)
        return got
