"""Helpers for interrupted streams: their requests, and the services that still work on one."""

import base64
import json
from random import Random

from tests.simulation.cluster import SimCluster
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.media import png

STOPS_WITHIN_S = 0.1
"""From the cut of a stream, and the engine step that is being computed comes on top."""


def body(rng: Random, images: int) -> bytes:
    """A streaming request with that many images, out of 200."""
    urls = [
        "data:image/png;base64," + base64.b64encode(png(28, 28, seed=rng.randrange(200))).decode()
        for _ in range(images)
    ]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    ask = {
        "model": FAKE_MODEL.model_id,
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "w5 w6"}]}],
        "stream": True,
        "max_tokens": 40,
    }
    return json.dumps(ask).encode()


def asked(rng: Random, images: int) -> tuple[str, bytes]:
    """Path and body of a streaming request to any of the endpoints that take images."""
    chat = json.loads(body(rng, images))
    (turn,), most = chat.pop("messages"), chat.pop("max_tokens")
    urls = [part["image_url"]["url"] for part in turn["content"] if part["type"] == "image_url"]
    match rng.randrange(3):
        case 0:
            parts = [{"type": "input_image", "image_url": url} for url in urls]
            turn["content"] = [*parts, {"type": "input_text", "text": "w5 w6"}]
            return "/v1/responses", json.dumps({**chat, "input": [turn], "max_output_tokens": most}).encode()
        case 1:
            blocks = [{"type": "image", "source": {"type": "url", "url": url}} for url in urls]
            turn["content"] = [*blocks, {"type": "text", "text": "w5 w6"}]
            return "/v1/messages", json.dumps({**chat, "messages": [turn], "max_tokens": most}).encode()
    return "/v1/chat/completions", json.dumps({**chat, "messages": [turn], "max_tokens": most}).encode()


def stages(cluster: SimCluster, request_id: str) -> list[str]:
    """The router and the text engines that still hold a request."""
    running = [task.request.request_id for task in cluster.router._requests]
    knowing = ["router"] if request_id in running else []
    for text in cluster.texts:
        jobs = (*text.engine._waiting, *text.engine._running)  # each is named after its request
        if any(job.startswith(f"{request_id}/") for job in jobs):
            knowing.append(text.name)
    return knowing


def working(cluster: SimCluster) -> dict[str, int]:
    """The work still in progress; releases of leases in flight count for the duration of a message."""
    return {name: number for name, number in cluster.held().items() if "lease" not in name}
