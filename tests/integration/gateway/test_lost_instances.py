"""A text instance that is lost during a stream: whatever the endpoint, its client reads the whole right answer."""

import asyncio
import json
from typing import Any

import pytest

from tests.integration.gateway.door import Door, make_gateway
from tests.integration.gateway.streams import stages
from tests.simulation.cluster import World, running
from tests.unit.services.gateway.endpoints import Endpoint, each_endpoint
from triptych.testing.fakes import FAKE_MODEL
from triptych.virtual.offload import InlineOffload
from triptych.virtual.virtual_time import run

TOKENS = 40


def body(endpoint: Endpoint) -> bytes:
    text: dict[str, Any] = {"messages": [{"role": "user", "content": "w5 w6"}], "prompt": "w5 w6", "input": "w5 w6"}
    asked = {name: text.get(name, value) for name, value in endpoint.ask.items()}
    most = "max_output_tokens" if "input" in asked else "max_tokens"
    return json.dumps({**asked, most: TOKENS, "model": FAKE_MODEL.model_id, "stream": True}).encode()


@each_endpoint
@pytest.mark.timeout(60)
def test_a_stream_goes_on_when_its_text_instance_is_killed(endpoint: Endpoint) -> None:
    async def play() -> None:
        clock = asyncio.get_running_loop().time
        async with running(World(encoders=1, texts=2)) as cluster:
            door = Door(make_gateway(cluster.router, InlineOffload(), clock), clock)
            whole = await door.post(endpoint.path, body(endpoint))
            begun = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                ask = group.create_task(
                    door.post(endpoint.path, body(endpoint), request_id="broken", on_body=lambda _: begun.set())
                )
                await begun.wait()
                (lost,) = [text for text in cluster.texts if text.name in stages(cluster, "broken")]
                await lost.kill()
            told = await cluster.router.timeline("broken")
            assert told.continuations == 1
            assert endpoint.streamed(ask.result().body.decode()) == endpoint.streamed(whole.body.decode()) != ""

    run(play())
