"""The items of a vLLM that runs by itself, from real encoders and a real router, without an engine."""

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests import identities
from tests.e2e.client import rest
from tests.e2e.reference import DIGITS
from triptych.cli.cluster import LocalCluster
from triptych.client import AsyncClient, ResolvedItem
from triptych.demo import MODEL_DIR
from triptych.domain.embedding import DType
from triptych.engine.checkpoint import open_checkpoint
from triptych.integrations.vllm.features import ItemForm
from triptych.integrations.vllm.items import ItemsLost
from triptych.integrations.vllm.options import parse
from triptych.integrations.vllm.pulling import PulledItems, ServedModel

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

IMAGES = sorted(DIGITS.glob("*.png"))
CHECKPOINT = open_checkpoint(MODEL_DIR)
WAIT_S = 20.0
NBYTES = 16 * 128 * 4
"""Of an item's embedding."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster(roles="E:1,PD:1") as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.router_target) as made:
        yield made
    await no_leases(cluster)


async def no_leases(cluster: LocalCluster) -> None:
    async with asyncio.timeout(WAIT_S):
        while await metric(cluster, "encoder-1", "triptych_arena_leases"):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)


@contextmanager
def source(cluster: LocalCluster, **options: Any) -> Iterator[PulledItems]:
    dtype = options.pop("dtype", DType.F32)
    given = parse({"routers": cluster.router_target, "timeout_s": WAIT_S, **options})
    form = ItemForm(CHECKPOINT.family.hidden_size, dtype, layers=0)
    made = PulledItems(given, ServedModel(CHECKPOINT, dtype), form)
    try:
        yield made
    finally:
        made.close()


def needed(items: Sequence[ResolvedItem]) -> dict[str, int]:
    return {item.uuid: item.ticket.tokens for item in items}


async def found(items: PulledItems, request: str, wanted: Mapping[str, int]) -> Mapping[str, torch.Tensor]:
    """As vLLM's loop does: ask until all are there."""
    async with asyncio.timeout(2 * WAIT_S):
        while (got := items.get(request, wanted)) is None:
            await asyncio.to_thread(items.settle, 0.05)
    return got


async def lost(items: PulledItems, request: str, wanted: Mapping[str, int]) -> str:
    with pytest.raises(ItemsLost) as caught:
        await found(items, request, wanted)
    items.drop(request)
    return str(caught.value)


async def metric(cluster: LocalCluster, process: str, name: str) -> float:
    async with rest(cluster.admin_urls[process]) as admin:
        text = (await admin.get("/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def keys_asked(cluster: LocalCluster) -> float:
    """Of all requests so far. They are counted as they end, after their answers: with the last lease."""
    await no_leases(cluster)
    return await metric(cluster, "router", "triptych_resolved_keys_total")


async def test_items_are_pulled_and_held_while_a_request_needs_them(cluster: LocalCluster, client: AsyncClient) -> None:
    with source(cluster) as items:
        async with client.resolve(IMAGES[:3]) as resolved:
            got = await found(items, "a", needed(resolved))
        assert [tuple(embedding.shape) for embedding in got.values()] == [(16, 128)] * 3
        assert len({embedding.sum().item() for embedding in got.values()}) == 3
        assert items.nbytes == 3 * NBYTES
        assert not items.waits
        items.drop("a")
        assert items.nbytes == 0


async def test_what_is_there_is_not_asked_for_again(cluster: LocalCluster, client: AsyncClient) -> None:
    with source(cluster) as items:
        async with client.resolve(IMAGES[:2]) as resolved:
            first = await found(items, "a", needed(resolved))
        asked = await keys_asked(cluster)
        held = await found(items, "b", needed(resolved))
        assert all(held[name] is first[name] for name in held), "one copy for both requests"
        items.drop("a")
        items.drop("b")
        again = await found(items, "c", needed(resolved))
        assert all(torch.equal(again[name], first[name]) for name in again)
        assert await keys_asked(cluster) == asked
        items.drop("c")


async def test_room_is_made_for_what_is_needed(cluster: LocalCluster, client: AsyncClient) -> None:
    """Copies of two items at a time. A request that waits for room gets it when another one ends."""
    with source(cluster, max_embedding_bytes=2 * (NBYTES + 1024)) as items:
        async with client.resolve(IMAGES[:4]) as resolved:
            await found(items, "a", needed(resolved[:2]))
            second = needed(resolved[2:])
            assert items.get("b", second) is None
            await asyncio.to_thread(items.settle, 0.5)
            assert items.get("b", second) is None
            assert items.nbytes == 2 * NBYTES
            items.drop("a")
            await found(items, "b", second)
            assert items.nbytes == 2 * NBYTES
            items.drop("b")


async def test_a_shared_item_counts_until_its_last_request_ends(cluster: LocalCluster, client: AsyncClient) -> None:
    with source(cluster, max_embedding_bytes=NBYTES + 1024) as items:
        async with client.resolve(IMAGES[:2]) as resolved:
            first, second = needed(resolved[:1]), needed(resolved[1:])
            await found(items, "a", first)
            await found(items, "b", first)
            items.drop("a")
            assert items.get("c", second) is None
            await asyncio.to_thread(items.settle, 0.5)
            assert items.get("c", second) is None
            items.drop("b")
            await found(items, "c", second)
            items.drop("c")


async def test_many_requests_at_once_get_their_own_items(cluster: LocalCluster, client: AsyncClient) -> None:
    with source(cluster) as items:
        async with client.resolve(IMAGES) as resolved:
            wanted = {f"r{number}": needed(resolved[number % 20 : number % 20 + 3]) for number in range(60)}
            got = [await found(items, name, keys) for name, keys in wanted.items()]
        assert [set(embeddings) for embeddings in got] == [set(keys) for keys in wanted.values()]
        assert items.nbytes == 22 * NBYTES
        for name in wanted:
            items.drop(name)
        assert items.nbytes == 0


async def test_what_cannot_come_is_lost_with_its_reason(cluster: LocalCluster, client: AsyncClient) -> None:
    with source(cluster) as items:
        assert "no embedding of this key is held" in await lost(items, "a", {"ab" * 32: 16})
        for name in ("hello", "", "AB" * 32, "zz" * 32, "ab" * 31 + "  ", "ab" * 33):
            assert "no key of an embedding" in await lost(items, "b", {name: 16})
        async with client.resolve(IMAGES[:2]) as resolved:
            wrong = {name: rows + 1 for name, rows in needed(resolved).items()}
            assert "has 16 rows, the prompt has 17" in await lost(items, "c", wrong)
            await found(items, "d", needed(resolved))
            assert "16 rows, not 17" in await lost(items, "e", wrong), "also of what is held"
            items.drop("d")


async def test_a_model_that_differs_is_refused(cluster: LocalCluster, client: AsyncClient) -> None:
    async with client.resolve(IMAGES[:1]) as resolved:
        with source(cluster, dtype=DType.BF16) as items:
            assert "is not this one: it has another dtype" in await lost(items, "a", needed(resolved))
        with source(cluster, model="another") as items:
            assert "set model to one of them" in await lost(items, "a", needed(resolved))


async def test_without_a_router_requests_fail_at_their_time_limit(cluster: LocalCluster) -> None:
    with source(cluster, routers="127.0.0.1:1", timeout_s=1.0) as items:
        started_s = time.monotonic()  # noqa: TID251 - of a test
        assert re.search("no router answers|not there within 1 s", await lost(items, "a", {"ab" * 32: 16}))
        assert time.monotonic() - started_s < 15  # noqa: TID251


async def test_a_request_that_ends_while_it_waits_leaves_nothing(cluster: LocalCluster, client: AsyncClient) -> None:
    with source(cluster) as items:
        async with client.resolve(IMAGES[:2]) as resolved:
            with stopped(cluster, "encoder-1"):
                assert items.get("a", needed(resolved)) is None
                items.drop("a")
                assert not items.waits
            await found(items, "b", needed(resolved))
            items.drop("b")


async def test_an_encoder_that_stops_loses_its_items_and_no_others(cluster: LocalCluster, client: AsyncClient) -> None:
    with source(cluster, timeout_s=4.0) as items:
        async with client.resolve(IMAGES[:2]) as resolved:
            first, second = needed(resolved[:1]), needed(resolved[1:])
            await found(items, "a", first)
            with stopped(cluster, "encoder-1"):
                assert await lost(items, "b", second)
                assert set(await found(items, "c", first)) == set(first)
            await found(items, "d", second)
            for name in "acd":
                items.drop(name)


async def test_closing_ends_what_runs(cluster: LocalCluster, client: AsyncClient) -> None:
    with stopped(cluster, "router"), source(cluster) as items:
        assert items.get("a", {"ab" * 32: 16}) is None
    items.drop("a")


async def test_under_tls_items_need_a_certificate_of_an_instance(tmp_path: Path) -> None:
    made = identities.cluster(tmp_path / "ca")
    flags = {
        name: identities.flags(made.folder / name.replace("_", "-"))
        for name in ("gateway", "router", "pool_manager", "encoder", "text")
    }
    async with LocalCluster(roles="E:1,PD:1", options=flags, log_dir=tmp_path) as cluster:
        user = identities.identity(made.folder / "user")
        async with AsyncClient(cluster.router_target, tls=user) as client, client.resolve(IMAGES[:2]) as resolved:
            for name, allowed in (("text", True), ("user", False)):
                certificate, key, trusted = map(str, identities.files(made.folder / name))
                own = {"tls_cert": certificate, "tls_key": key, "tls_ca": trusted, "tls_name": identities.DOMAIN}
                with source(cluster, **own) as items:
                    if allowed:
                        assert set(await found(items, "a", needed(resolved))) == set(needed(resolved))
                        items.drop("a")
                    else:
                        assert "is not reachable from here" in await lost(items, "a", needed(resolved))


@contextmanager
def stopped(cluster: LocalCluster, name: str) -> Iterator[None]:
    cluster.kill(name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.kill(name, signal.SIGCONT)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "routers"),
        ({"routers": "nowhere"}, "it is not HOST:PORT"),
        ({"routers": "a:1", "colour": 1}, "no key colour"),
        ({"routers": "a:1", "timeout_s": 0}, "timeout_s"),
        ({"routers": "a:1", "image_cache_bytes": 10}, "image_cache_bytes"),
        ({"routers": "a:1", "tls_cert": "x"}, "TLS needs"),
        ({"routers": "a:1", "arena": "device"}, "host memory"),
        ({"routers": 7}, "routers"),
    ],
)
def test_options_that_cannot_work_are_refused(options: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(options)


def test_options_of_groups_are_flat() -> None:
    made = parse({"routers": "a:1, b:2", "max_pull_s": 3, "transports": ["tcp"], "max_embedding_bytes": 7})
    assert made.addresses == ("a:1", "b:2")
    assert (made.transfers.max_pull_s, made.transfers.transports) == (3.0, ("tcp",))
    assert made.tensor_cache.max_embedding_bytes == 7
