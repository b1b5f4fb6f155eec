"""A burst of requests over sockets, through gateway, router and fake engines: each is answered, or refused with 429."""

import asyncio
from collections import Counter
from random import Random

import pytest

from tests.integration.gateway.streams import body
from tests.integration.gateway.wired import HOST, wired
from tests.simulation.cluster import World
from triptych.policy.admission import ServerBounds

REQUESTS = 1500
AT_ONCE = 1200
"""What the router takes: the others are refused there."""


@pytest.mark.timeout(180)
@pytest.mark.extended
async def test_each_request_of_a_burst_is_answered_or_gets_retry_after() -> None:
    asyncio.get_running_loop().set_debug(False)  # debug mode would take most of the time
    capacity = ServerBounds(max_concurrent_requests=AT_ONCE)
    world = World(encoders=2, texts=2, router={"heartbeat_timeout_s": 60.0, "capacity": capacity})
    seen: Counter[tuple[int, bool]] = Counter()
    async with wired(world) as site:

        async def ask(number: int) -> None:
            asked = body(Random(number), images=0)
            reader, writer = await asyncio.open_connection(HOST, site.port)
            head = f"host: localhost\r\nconnection: close\r\ncontent-length: {len(asked)}\r\n\r\n"
            writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + asked)
            answer = await reader.read()
            writer.close()
            told, _, _ = answer.partition(b"\r\n\r\n")
            seen[int(told.split()[1]), b"\r\nretry-after: " in told] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                group.create_task(ask(number))
    assert set(seen) <= {(200, False), (429, True)}, seen
    assert seen[200, False] >= AT_ONCE
