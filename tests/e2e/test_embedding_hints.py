"""Two routers of the same encoders, as processes: an image that goes through both is encoded once."""

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.e2e.client import rest, stream_message
from tests.e2e.delayed import delayed
from triptych.cli import ports
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_DIR, MODEL_ID
from triptych.domain.chat import MediaPart, Message, TextPart
from triptych.domain.media import Modality
from triptych.rpc.stubs import RouterStub
from triptych.testing.media import png

ENCODE_S = 0.5
REPORTED_S = 0.3
"""By then routers know of a change."""
START_S = 240.0


@contextlib.asynccontextmanager
async def another_router(cluster: LocalCluster, log: Path) -> AsyncIterator[RouterStub]:
    """A router of the cluster's instances, beside its own. It is ready."""
    port, admin_port = ports.free(2, ())
    instances = ",".join(cluster.targets[name] for name in ("encoder-1", "encoder-2", "text-1"))
    told = ("--instances", instances, "--model", str(MODEL_DIR), "--port", str(port), "--admin-port", str(admin_port))
    with log.open("wb") as output:
        command = (sys.executable, "-m", "triptych.services.router", *told)
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
        router = RouterStub(ports.address(port))
        try:
            async with asyncio.timeout(START_S):
                while not await is_ready(admin_port):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
            yield router
        finally:
            await router.close()
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(240):
                assert await process.wait() == 0


async def is_ready(admin_port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        async with rest(f"http://{ports.address(admin_port)}") as admin:
            return (await admin.get("/ready")).is_success
    return False


async def embeddings(cluster: LocalCluster) -> int:
    """In the arenas of all encoders: one that was encoded twice counts twice."""
    found = 0.0
    for name in ("encoder-1", "encoder-2"):
        async with rest(cluster.admin_urls[name]) as admin:
            text = (await admin.get("/metrics")).text
        values = re.findall(r"^triptych_arena_embeddings\S* (\S+)$", text, re.MULTILINE)
        assert len(values) == 1, text
        found += float(values[0])
    return int(found)


async def test_an_image_through_two_routers_is_encoded_once_however_far_apart(tmp_path: Path) -> None:
    options = delayed(tmp_path, pass_s=ENCODE_S, token_s=1e-6, step_s=0.005, prefill_token_s=1e-6)
    async with (
        LocalCluster(roles="E:2,PD:1", options=options, log_dir=tmp_path / "logs") as cluster,
        another_router(cluster, tmp_path / "router.log") as other,
    ):
        stub = RouterStub(cluster.router_target)

        async def ask(router: RouterStub, image: int, name: str, after_s: float = 0.0) -> None:
            await asyncio.sleep(after_s)
            parts = (MediaPart(Modality.IMAGE, png(56, 56, seed=image)), TextPart("What is it?"))
            await stream_message(router, f"{name}-{image}", MODEL_ID, Message("user", parts), 2)

        images = 0
        try:
            for offset_s in (0.0, 0.1, 0.3, 0.45, 1.0):
                for first, second in ((stub, other), (other, stub)):
                    # One encoder has other work, which ends before the image is encoded.
                    images += 2
                    async with asyncio.TaskGroup() as group:
                        group.create_task(ask(second, images - 1, "load"))
                        group.create_task(ask(first, images, "first", REPORTED_S))
                        group.create_task(ask(second, images, "second", REPORTED_S + offset_s))
                    assert await embeddings(cluster) == images, f"{offset_s} s apart"
                    await asyncio.sleep(REPORTED_S)
        finally:
            await stub.close()
