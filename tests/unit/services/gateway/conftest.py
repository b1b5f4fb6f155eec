from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest

from tests.unit.services.gateway.fakes import FakeRouter
from triptych.runtime.clock import monotonic
from triptych.runtime.offload import ThreadOffload
from triptych.services.gateway.app import remote_media
from triptych.services.gateway.keys import KeyRing
from triptych.services.gateway.routes import create_app
from triptych.services.gateway.service import Gateway
from triptych.services.gateway.settings import GatewaySettings

Rest = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def rest() -> Rest:
    """A client of a gateway in this process in front of the given router; settings by keyword."""

    @asynccontextmanager
    async def connect(router: FakeRouter, **settings: object) -> AsyncGenerator[httpx.AsyncClient]:
        offload = ThreadOffload(1, name="test-parse")
        chosen = GatewaySettings(**settings)  # type: ignore[arg-type]
        gateway = Gateway(
            router,
            offload,
            chosen,
            lambda: 1_700_000_000.5,
            keys=KeyRing.load(chosen.keys, monotonic),
            media=remote_media(chosen),
        )
        transport = httpx.ASGITransport(create_app(gateway, clock=monotonic))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                yield client
            assert (gateway.admission.requests, gateway.admission.nbytes) == (0, 0), (
                "a request or its bytes are still counted"
            )
        finally:
            offload.close()

    return connect
