"""Helpers for interrupted streams: their requests, and which services still work on one."""

import base64
import json
from random import Random

from tests.simulation.cluster import SimCluster
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.media import png

STOPS_WITHIN_S = 0.1
"""From the cut of a stream, and the engine step that is being computed comes on top."""


def body(rng: Random, images: int) -> bytes:
    """A request for a stream, with so many images out of 200."""
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


def stages(cluster: SimCluster, request_id: str) -> list[str]:
    """The router and the text engines that still know a request."""
    running = [task.request.request_id for task in cluster.router._tasks.values()]
    knowing = ["router"] if request_id in running else []
    for text in cluster.texts:
        jobs = (*text.engine._waiting, *text.engine._running)  # each is named after its request
        if any(job.startswith(f"{request_id}/") for job in jobs):
            knowing.append(text.name)
    return knowing


def working(cluster: SimCluster) -> dict[str, int]:
    """What is still being worked on; leases given back are on their way for as long as a message takes."""
    return {name: number for name, number in cluster.held().items() if "lease" not in name}
