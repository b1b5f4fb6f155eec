"""A port in use is noticed before a model is loaded."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triptych.domain.stage import Role
from triptych.errors import Unavailable
from triptych.services.encoder import app as encoder
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.text import app as text
from triptych.services.text import mounted
from triptych.services.text.settings import TextSettings

NO_MODEL = Path("/there/is/no/model")


@pytest.mark.parametrize(
    "opening",
    [
        lambda port: encoder.app(EncoderSettings(model=NO_MODEL, port=port)),
        lambda port: text.app(TextSettings(model=NO_MODEL, port=port)),
        lambda port: mounted.app(TextSettings(model=NO_MODEL, port=port, role=Role.EPD)),
    ],
    ids=["encoder", "text", "hybrid"],
)
def test_a_port_in_use_is_noticed_first(opening: Callable[[int], Any]) -> None:
    async def start(port: int) -> None:
        async with opening(port):
            raise AssertionError("it has started")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"cannot listen on port {port} of 127.0.0.1: is it in use"):
            asyncio.run(start(port))
