"""A thousand connections closed at random points: TCP to the gateway, gRPC behind it, engines that compute nothing."""

import asyncio
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import psutil
import pytest

from tests.integration.gateway.streams import STOPS_WITHIN_S, body, stages
from tests.integration.gateway.wired import HOST, Wired, wired
from tests.simulation.cluster import World

STREAMS = 1000
AT_ONCE = 40
LATEST_CUT_S = 0.05
"""After the body, of a stream that is cut while it waits."""
SETTLE_S = 20.0
ALONE = 24
STEP_S = 0.08
"""Of the engine, while streams are cut alone. An answer takes four more at least: none of them ends by itself in time."""
TICK_S = 0.002
EVENT = b"data: "

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class OwnTime:
    """Time that does not advance while other processes use the CPU.

    It requests a wake-up after each tick; a late one advances it by the CPU time of this process only.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        began_s, began_cpu_s = clock(), time.process_time()
        while True:
            await asyncio.sleep(TICK_S)
            now_s, cpu_s = clock(), time.process_time()
            self.now_s += min(now_s - began_s, TICK_S + cpu_s - began_cpu_s)
            began_s, began_cpu_s = now_s, cpu_s

    async def until(self, done: Callable[[], bool]) -> float:
        """The time until the condition holds."""
        began_s = self.now_s
        while not done():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(TICK_S)
        return self.now_s - began_s


@asynccontextmanager
async def own_time() -> AsyncIterator[OwnTime]:
    own = OwnTime()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(own.run())
        yield own
        running.cancel()


async def opened(site: Wired, data: bytes) -> Connection:
    reader, writer = await asyncio.open_connection(HOST, site.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


def request(request_id: str, asked: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {request_id}\r\n"
    return f"{head}content-length: {len(asked)}\r\n\r\n".encode() + asked


async def cut(connection: Connection, *, reset: bool) -> None:
    """Closes it as an exiting program does, or (``reset``) by RST, as a host without such a connection."""
    writer = connection[1]
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
    await asyncio.sleep(0)  # the loop closes it in its next iteration


async def events(connection: Connection, number: int) -> None:
    reader = connection[0]
    assert b" 200 " in await reader.readuntil(b"\r\n")
    for _ in range(number):
        await reader.readuntil(EVENT)


async def cut_somewhere(site: Wired, number: int) -> str:
    """Where it was cut: in the ``body``, before any response (``waiting``), or while ``streaming``."""
    rng = Random(f"cut/{number}")
    whole = request(f"r{number}", body(rng, images=rng.randrange(4)))
    where = rng.choice(("body", "waiting", "streaming"))
    if where == "body":
        connection = await opened(site, whole[: rng.randrange(1, len(whole))])
        await asyncio.sleep(rng.uniform(0, LATEST_CUT_S))
    else:
        connection = await opened(site, whole)
        if where == "waiting":
            try:
                await asyncio.wait_for(events(connection, 1), rng.uniform(0, LATEST_CUT_S))
                where = "streaming"
            except TimeoutError:
                pass
        else:
            await events(connection, rng.randrange(1, 4))
    await cut(connection, reset=rng.random() < 0.5)
    return where


async def settled(left: Callable[[], dict[str, int]]) -> None:
    """Returns once nothing is left. Raises AssertionError with what leaked."""
    try:
        async with asyncio.timeout(SETTLE_S):
            while left():  # noqa: ASYNC110 - what is waited for tells nobody
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"left over: {left()}") from None


def in_process() -> dict[str, int]:
    return {"tasks": len(asyncio.all_tasks()), "descriptors": psutil.Process().num_fds()}


async def ask_whole(site: Wired, request_id: str = "whole") -> None:
    connection = await opened(site, request(request_id, body(Random(1), images=2)))
    await connection[0].readuntil(b"data: [DONE]")
    await cut(connection, reset=False)


@pytest.mark.timeout(240)
@pytest.mark.extended
async def test_a_thousand_cut_connections_leak_nothing_in_any_stage() -> None:
    asyncio.get_running_loop().set_debug(False)  # debug mode would take most of the time
    async with wired(World(encoders=2, texts=2, router={"heartbeat_timeout_s": 60.0})) as site:
        # What is set up by the first request to each instance stays.
        await asyncio.gather(*(ask_whole(site, f"first {number}") for number in range(8)))
        await settled(site.held)
        before = in_process()

        def left() -> dict[str, int]:
            more = {name: number - before[name] for name, number in in_process().items()}
            return site.held() | {name: number for name, number in more.items() if number > 0}

        hits: Counter[str] = Counter()
        for first in range(0, STREAMS, AT_ONCE):
            async with asyncio.TaskGroup() as group:
                streams = [group.create_task(cut_somewhere(site, number)) for number in range(first, first + AT_ONCE)]
            hits.update(stream.result() for stream in streams)
            del streams
            await settled(left)
        assert hits["body"] > STREAMS // 4, hits
        assert min(hits["waiting"], hits["streaming"]) > STREAMS // 8, hits
        site.cluster.validate()
        await ask_whole(site)


@pytest.mark.timeout(240)
async def test_every_stage_drops_a_cut_request_within_a_tenth_of_a_second_and_a_step() -> None:
    """Connections are cut one at a time, while the engine has the request, before its first token or after some."""
    asyncio.get_running_loop().set_debug(False)
    async with wired(World(encoders=1, texts=1)) as site, own_time() as own:
        await ask_whole(site)
        site.cluster.texts[0].engine.step_s = STEP_S
        took_s = []
        for number in range(ALONE):
            rng = Random(f"alone/{number}")
            request_id = f"r{number}"
            connection = await opened(site, request(request_id, body(rng, images=rng.randrange(4))))
            if number % 2:
                await events(connection, 1)
            else:
                await own.until(partial(_generates, site, request_id))
            assert stages(site.cluster, request_id) == ["router", "t0"]
            await cut(connection, reset=rng.random() < 0.5)
            took_s.append(await own.until(partial(_is_forgotten, site, request_id)))
            await settled(site.held)
    assert max(took_s) < STOPS_WITHIN_S + STEP_S, [round(one_s, 3) for one_s in took_s]


def _generates(site: Wired, request_id: str) -> bool:
    return "t0" in stages(site.cluster, request_id)


def _is_forgotten(site: Wired, request_id: str) -> bool:
    return not stages(site.cluster, request_id)
