"""An instance whose memory nobody can connect to any more ends."""

import asyncio
import socket
from typing import Any

import pytest

from triptych import demo
from triptych.engine.decoder.options import EngineOptions
from triptych.services.encoder.app import app as encoder_app
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.text.app import app as text_app
from triptych.services.text.settings import TextSettings
from triptych.transport.options import TransferOptions

MIB = 1 << 20


@pytest.mark.parametrize(
    ("kind", "at", "arenas"),
    [
        *(pytest.param(*other, marks=pytest.mark.extended) for other in (("encoder", 0, 1), ("text", 0, 2))),
        ("text", 1, 2),
    ],
)
async def test_an_instance_ends_when_a_listening_socket_is_dead(
    monkeypatch: pytest.MonkeyPatch, kind: str, at: int, arenas: int
) -> None:
    """A text instance has two arenas: of what it pulls, and of the keys and values that it transfers."""
    create, bound = socket.create_server, list[socket.socket]()

    def recorded(*given: Any, **named: Any) -> socket.socket:
        bound.append(create(*given, **named))
        return bound[-1]

    monkeypatch.setattr(socket, "create_server", recorded)
    shared: Any = {
        "model": demo.MODEL_DIR,
        "model_id": demo.MODEL_ID,
        "port": 0,
        "transfers": TransferOptions(("tcp",)),
    }
    if kind == "encoder":
        opened: Any = encoder_app(EncoderSettings(**shared, arena_bytes=MIB))
    else:
        engine = EngineOptions(kv_cache_bytes=MIB)
        opened = text_app(TextSettings(**shared, image_cache_bytes=MIB, engine=engine))
    async with opened as running:
        assert len(bound) == arenas
        bound[at].shutdown(socket.SHUT_RDWR)
        async with asyncio.timeout(60):
            assert await running.failed() == "the listening socket of tcp"
