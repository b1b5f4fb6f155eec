"""Many concurrent requests: streams in bounded memory, and a responsive health check while bodies are parsed."""

import asyncio
import base64
import gc
import json
import re
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator, Sequence

import psutil
import pytest

from tests.integration.gateway.door import Door, Got, make_gateway
from tests.integration.gateway.flood import exchange
from tests.unit.services.gateway.fakes import FINISH, FakeRouter
from triptych.domain.chat import ChatRequest
from triptych.domain.generation import ChatEvent, TokenChunk
from triptych.runtime.clock import monotonic
from triptych.runtime.offload import ThreadOffload
from triptych.virtual.offload import InlineOffload

STREAMS = 2000
STREAM_BYTES = 100 << 10
"""Most memory that one open stream may take."""
KEPT_BYTES = 5 << 18
"""Most memory that stays: tables of asyncio that have grown, and what the gateway records of its last requests, which is bounded."""
IMAGE_BYTES = 2 << 20
LARGE_IMAGE_BYTES = 8 << 20
CONNECTIONS, POSTS = 4, 3
HEALTH_S = 0.1
"""What nine of ten probes must stay below: the machine that runs this has others to serve."""
PROBE_S = 0.005
PROBES = 20
"""So many at least, or nothing was shown."""

ASK = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


class HeldRouter(FakeRouter):
    """Sends one word at once, and the rest when released."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.open = 0

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        self.open += 1
        try:
            yield (TokenChunk((1,), "word"),)
            await self.go.wait()
            yield FINISH
        finally:
            self.open -= 1


@pytest.mark.timeout(120)
async def test_two_thousand_concurrent_streams_take_bounded_memory() -> None:
    asyncio.get_running_loop().set_debug(False)  # debug mode would take most of the memory
    router = HeldRouter()
    gateway = make_gateway(router, InlineOffload(), monotonic)
    door = Door(gateway, monotonic)
    body = json.dumps(ASK).encode()
    await_all = asyncio.Event()

    def begun(_: Got) -> None:
        if router.open == STREAMS:
            await_all.set()

    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        async with asyncio.TaskGroup() as group:
            streams = [
                group.create_task(door.post("/v1/chat/completions", body, on_body=begun)) for _ in range(STREAMS)
            ]
            await await_all.wait()
            assert gateway.admission.requests == STREAMS
            held = tracemalloc.get_traced_memory()[0] - before
            router.go.set()
        answers = [stream.result() for stream in streams]
        assert all(answer.body.endswith(b"data: [DONE]\n\n") for answer in answers)
        del streams, answers
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < STREAMS * STREAM_BYTES, f"{held / STREAMS:.0f} bytes per stream"
    assert kept < KEPT_BYTES, f"{kept} bytes are kept"
    assert (gateway.admission.requests, gateway.admission.nbytes, router.open) == (0, 0, 0)


def assert_in_time(waits_s: list[float]) -> None:
    waits_s.sort()
    assert waits_s[len(waits_s) * 9 // 10] < HEALTH_S, f"health took {waits_s[-1]:.3f} s at worst"


@pytest.mark.timeout(120)
async def test_health_is_answered_while_large_bodies_are_parsed() -> None:
    """Latency is this process's CPU time between a probe and its response, which other load does not affect."""
    asyncio.get_running_loop().set_debug(False)
    url = "data:image/png;base64," + base64.b64encode(bytes(IMAGE_BYTES)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({**ASK, "stream": False, "messages": [{"role": "user", "content": content}]}).encode()
    offload = ThreadOffload(2, name="parse")
    door = Door(make_gateway(FakeRouter(), offload, monotonic), monotonic)
    waits_s: list[float] = []
    try:
        async with asyncio.TaskGroup() as group:
            asks = [group.create_task(door.post("/v1/chat/completions", body)) for _ in range(16)]
            while not all(ask.done() for ask in asks):
                began_s = time.process_time()
                await asyncio.sleep(PROBE_S)  # a probe that comes while the loop is blocked waits too
                assert (await door.get("/health")).status == 200
                waits_s.append(time.process_time() - began_s)
    finally:
        offload.close()
    assert {ask.result().status for ask in asks} == {200}
    assert_in_time(waits_s)


@pytest.mark.timeout(120)
async def test_health_is_answered_over_sockets_while_large_bodies_are_received() -> None:
    """Gateway and clients are separate processes without a router, so that only parsing is measured.

    Latency is the gateway's CPU time, as above.
    """
    gateway = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "triptych.services.gateway",
            "--port",
            "0",
            "--router",
            "127.0.0.1:1",
            "--admin-port",
            "0",
        ),
        stderr=asyncio.subprocess.PIPE,
    )
    process = psutil.Process(gateway.pid)
    waits_s: list[float] = []
    try:
        port = await _port_of(gateway)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.gateway.flood"),
            *map(str, (port, CONNECTIONS, POSTS, LARGE_IMAGE_BYTES)),
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.TaskGroup() as group:
            flooding = group.create_task(client.communicate())
            while not flooding.done():
                began_s = sum(process.cpu_times()[:2])
                assert await exchange(reader, writer, "GET /health") == 200
                waits_s.append(sum(process.cpu_times()[:2]) - began_s)
                await asyncio.sleep(PROBE_S)
        writer.close()
    finally:
        gateway.terminate()
        await gateway.communicate()
    assert json.loads(flooding.result()[0]) == [503] * CONNECTIONS * POSTS
    assert len(waits_s) > PROBES
    assert_in_time(waits_s)


async def _port_of(gateway: asyncio.subprocess.Process) -> int:
    assert gateway.stderr is not None
    async for line in gateway.stderr:
        if (found := re.search(rb"listening on http://127.0.0.1:(\d+)", line)) is not None:
            return int(found[1])
    raise AssertionError("the gateway does not listen")
