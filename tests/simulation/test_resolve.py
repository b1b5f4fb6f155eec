"""Resolving in the simulated cluster: real encoders' services and arenas, faults from seeds, nothing left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, simulate
from tests.simulation.workload import make_asks, play
from triptych.domain.chat import MediaPart
from triptych.domain.media import Modality
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.errors import NotFound, TriptychError, Unavailable
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.media import png
from triptych.virtual.links import Fault


def of_media(*seeds: int, name: str = "r", timeout_s: float = 60.0) -> ResolveRequest:
    media = tuple(MediaPart(Modality.IMAGE, png(56, 56, seed=seed)) for seed in seeds)
    return ResolveRequest(name, FAKE_MODEL.model_id, media, timeout_s=timeout_s)


def of_keys(*items: ResolvedItem) -> ResolveRequest:
    return ResolveRequest("k", FAKE_MODEL.model_id, keys=tuple(item.ticket.key for item in items), timeout_s=10.0)


@asynccontextmanager
async def held(cluster: SimCluster, request: ResolveRequest) -> AsyncIterator[tuple[ResolvedItem, ...]]:
    answer = cluster.router.resolve(request)
    try:
        yield await anext(answer)
    finally:
        await answer.aclose()


def test_an_embedding_outlives_its_lease_and_the_arena_is_full_of_others_while_it_is_held() -> None:
    async def scenario(cluster: SimCluster) -> None:
        async with held(cluster, of_media(1, timeout_s=300.0)) as items:
            for number in range(100):
                async with held(cluster, of_media(1000 + number, name=f"r{number}")):
                    await asyncio.sleep(2.0)
            async with held(cluster, of_keys(*items)) as found:
                assert found[0].ticket.key == items[0].ticket.key

    simulate(World(seed=1, encoders=1, encoder_arena_bytes=4096, texts=0), scenario)


def test_an_embedding_that_was_evicted_is_not_found() -> None:
    async def scenario(cluster: SimCluster) -> None:
        async with held(cluster, of_media(1)) as items:
            pass
        for number in range(30):
            async with held(cluster, of_media(1000 + number, name=f"r{number}")):
                pass
        with pytest.raises(NotFound):
            await anext(cluster.router.resolve(of_keys(*items)))

    simulate(World(seed=2, encoders=1, encoder_arena_bytes=4096, texts=0), scenario)


def test_an_encoder_that_restarts_has_lost_its_keys() -> None:
    async def scenario(cluster: SimCluster) -> None:
        async with held(cluster, of_media(1)) as items:
            await cluster.encoders[0].kill()
            with pytest.raises(Unavailable):
                await anext(cluster.router.resolve(of_keys(*items)))
            await cluster.encoders[0].start()
            await asyncio.sleep(5.0)
            with pytest.raises(NotFound):
                await anext(cluster.router.resolve(of_keys(*items)))
            async with held(cluster, of_media(1, name="again")) as again:
                assert again[0].uuid == items[0].uuid

    simulate(World(seed=3, encoders=1, texts=0), scenario)


@pytest.mark.parametrize("seed", range(3))
def test_resolves_and_chats_with_lost_calls_leave_nothing(seed: int) -> None:
    rng = Random(seed)

    def fault(link: str, method: str) -> Fault:
        del link
        if method in ("encode", "lease", "release") and rng.random() < 0.05:
            return rng.choice((Fault.REQUEST_LOST, Fault.REPLY_LOST))
        return Fault.NONE

    async def client(cluster: SimCluster, number: int, own: Random) -> None:
        await asyncio.sleep(own.uniform(0, 3))
        seeds = [own.randrange(20) for _ in range(own.randint(1, 4))]
        try:
            async with held(cluster, of_media(*seeds, name=f"v{number}", timeout_s=20.0)) as items:
                await asyncio.sleep(own.uniform(0, 1))
                async with held(cluster, of_keys(*items)) as found:
                    assert [item.uuid for item in found] == [item.uuid for item in items]
                    await asyncio.sleep(own.uniform(0, 1))
        except TriptychError as error:
            assert isinstance(error, Unavailable), repr(error)  # noqa: PT017 - any other is a defect

    async def scenario(cluster: SimCluster) -> None:
        async with asyncio.TaskGroup() as group:
            chats = group.create_task(play(cluster.router, make_asks(seed, 40)))
            for number in range(60):
                group.create_task(client(cluster, number, Random(f"{seed}/{number}")))
        check_right(chats.result())

    simulate(World(seed=seed, fault=fault), scenario)
