import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.unit.client.scripted import ScriptedRouter, behind_grpc


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def target(router: ScriptedRouter) -> Iterator[str]:
    """The address of a router that runs on a loop in another thread."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with behind_grpc(router) as address:
            started.set_result((address, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, loop, stop = started.result(10)
    yield address
    loop.call_soon_threadsafe(stop.set)
    thread.join()
