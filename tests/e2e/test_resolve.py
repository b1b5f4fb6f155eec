"""Resolving over gRPC: what is held goes with the caller, however it ends."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.client import rest
from tests.e2e.delayed import delayed
from tests.e2e.reference import DIGITS
from triptych import AsyncClient
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.chat import MediaPart
from triptych.domain.media import Modality
from triptych.domain.resolving import ResolveRequest
from triptych.domain.timeline import Outcome
from triptych.errors import InvalidMedia, NotFound
from triptych.rpc.stubs import RouterStub
from triptych.testing.media import png

pytestmark = pytest.mark.asyncio(loop_scope="module")

IMAGES = [DIGITS / f"{digit}_a.png" for digit in range(4)]
WAIT_S = 40.0
HOLDER = """
import sys, time
from triptych import Client
with Client(sys.argv[1]) as client, client.resolve(sys.argv[2:]) as items:
    print(*(item.uuid for item in items), flush=True)
    time.sleep(600)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(options=delayed(tmp_path_factory.mktemp("engines"))) as made:
        yield made


async def leases(cluster: LocalCluster) -> int:
    """Of all encoders."""
    found = 0.0
    for name in ("encoder-1", "encoder-2"):
        async with rest(cluster.admin_urls[name]) as admin:
            text = (await admin.get("/metrics")).text
        found += sum(float(held) for held in re.findall(r"^triptych_arena_leases (\S+)$", text, re.MULTILINE))
    return int(found)


async def until_leases(cluster: LocalCluster, wanted: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while await leases(cluster) != wanted:  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.05)


async def test_embeddings_are_held_within_the_context_and_found_by_their_keys(cluster: LocalCluster) -> None:
    router = RouterStub(cluster.router_target)
    async with AsyncClient(cluster.router_target) as client:
        async with client.resolve(IMAGES) as items:
            assert await leases(cluster) == 2 * len(IMAGES)
            assert {item.ticket.address for item in items} <= set(cluster.targets.values())
            keys = tuple(item.ticket.key for item in items)
            answer = router.resolve(ResolveRequest("keys", MODEL_ID, keys=keys, timeout_s=WAIT_S))
            assert [item.ticket.key for item in await anext(answer)] == list(keys)
            assert await leases(cluster) == 3 * len(IMAGES)
            await answer.aclose()
        await until_leases(cluster, 0)
        with pytest.raises(NotFound):
            await anext(router.resolve(ResolveRequest("none", MODEL_ID, keys=(bytes(32),), timeout_s=WAIT_S)))
        with pytest.raises(InvalidMedia) as caught:
            async with client.resolve([IMAGES[0], b"none"]):
                pass
        assert caught.value.param == "media[1]"
    await router.close()


async def test_a_large_image_is_sent_in_a_call_of_its_own(cluster: LocalCluster) -> None:
    large = png(600, 600, seed=1)
    assert len(large) > 256 << 10
    async with AsyncClient(cluster.router_target) as client:
        async with client.resolve([large]) as (item,):
            assert item.ticket.tokens == 16
        await until_leases(cluster, 0)


async def test_a_caller_that_is_killed_leaves_no_lease(cluster: LocalCluster) -> None:
    caller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, cluster.router_target, *map(str, IMAGES), stdout=subprocess.PIPE
    )
    assert caller.stdout is not None
    uuids = (await caller.stdout.readline()).split()
    assert len(uuids) == len(IMAGES)
    assert await leases(cluster) == 2 * len(IMAGES)
    caller.send_signal(signal.SIGKILL)
    await caller.wait()
    await until_leases(cluster, 0)


async def test_the_timeline_ends_when_the_caller_leaves(cluster: LocalCluster) -> None:
    router = RouterStub(cluster.router_target)
    async with AsyncClient(cluster.router_target) as client:
        async with client.resolve(IMAGES[:1]) as items:
            ticket = items[0].ticket
        again = router.resolve(ResolveRequest("again", MODEL_ID, keys=(ticket.key,), timeout_s=WAIT_S))
        (found,) = await anext(again)
        assert found.cached
        await again.aclose()
    media = (MediaPart(Modality.IMAGE, IMAGES[1].read_bytes()),)
    stub = router.resolve(ResolveRequest("timed", MODEL_ID, media, timeout_s=WAIT_S))
    await anext(stub)
    assert (await router.timeline("timed")).outcome is Outcome.RUNNING
    await stub.aclose()
    async with asyncio.timeout(WAIT_S):
        while (await router.timeline("timed")).outcome is Outcome.RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    timeline = await router.timeline("timed")
    assert (timeline.outcome, len(timeline.items), timeline.text_instance) == (Outcome.DONE, 1, "")
    await router.close()
