"""What encoders publish of their embeddings, under virtual time: equal images of two routers are encoded once, also when they
come one after the other, and hints that are wrong, lost or late cost an encoding at most.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from tests.simulation.cluster import MIB, SimCluster, World
from tests.simulation.test_cluster import check_right, simulate
from tests.simulation.test_single_flight import about
from tests.simulation.workload import Ask, Reply, make_asks, play
from triptych.domain.instance import InstanceLoad
from triptych.services.router.service import RouterService
from triptych.testing.media import png
from triptych.virtual.links import LinkedInstance

SLOW = World(encoders=3, encode_token_s=0.0125)
"""An image of 56 x 56 takes 0.2 s."""
REPORTED_S = 0.05
"""By then routers know of a change, as long as load is not reported again within 20 ms."""


@asynccontextmanager
async def another_router(
    cluster: SimCluster, name: str = "other", client: type[LinkedInstance] | None = None
) -> AsyncIterator[RouterService]:
    made = client or LinkedInstance

    def connect(address: str) -> LinkedInstance:
        instance = cluster.name_at(address)
        return made(cluster.link(f"{name}->{instance}", cluster.processes[instance]))

    router = cluster.make_router(cluster.source, connect, name=name)
    try:
        async with asyncio.timeout(10):
            while len((await router.readiness()).instances) < len(cluster.processes):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield router
        assert not router.cluster.machine.outstanding
        assert not router.running
    finally:
        router.close()


def image(number: int) -> bytes:
    return png(56, 56, seed=number)


def encoded(cluster: SimCluster) -> int:
    return sum(node.engine.encoded_items for node in cluster.encoders)


def about_image(number: int, name: str, at_s: float = 0.0) -> Ask:
    return replace(about(image(number), f"{name}{number}"), at_s=at_s)


@pytest.mark.parametrize("offset_s", [0.0, 0.001, 0.01, 0.05, 0.1, 0.15, 0.195, 0.3, 2.0])
def test_the_same_image_through_two_routers_is_encoded_once_however_far_apart(offset_s: float) -> None:
    """While the encoders have unequal other work, through both routers."""

    async def scenario(cluster: SimCluster) -> None:
        rng, images = Random(f"{offset_s}"), 0
        async with another_router(cluster) as other:
            for _ in range(8):
                asks: tuple[list[Ask], list[Ask]] = ([], [])
                at_s = 0.0
                for _ in range(rng.randint(0, 4)):
                    images += 1
                    rng.choice(asks).append(about_image(images, "load", at_s))
                    at_s += REPORTED_S
                images += 1
                first, second = rng.sample(asks, 2)
                first.append(about_image(images, "first", at_s))
                second.append(about_image(images, "second", at_s + offset_s))
                await play_both(cluster.router, other, *asks)
                assert encoded(cluster) == images
                await asyncio.sleep(REPORTED_S)

    simulate(SLOW, scenario)


async def play_both(first: RouterService, second: RouterService, *asks: list[Ask]) -> list[list[Reply]]:
    async with asyncio.TaskGroup() as group:
        playing = [group.create_task(play(router, mine)) for router, mine in zip((first, second), asks, strict=True)]
    replies = [task.result() for task in playing]
    for of_router in replies:
        check_right(of_router)
    return replies


def test_a_router_that_starts_later_knows_what_is_held() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, [about_image(number, "first", number / 20) for number in range(40)]))
        before = [node.engine.encoded_items for node in cluster.encoders]
        assert sum(before) == 40
        async with another_router(cluster) as other:
            await asyncio.sleep(REPORTED_S)
            check_right(await play(other, [about_image(number, "again") for number in Random(1).sample(range(40), 40)]))
            assert [node.engine.encoded_items for node in cluster.encoders] == before

    simulate(SLOW, scenario)


def test_equal_images_of_one_router_share_an_encoding_though_another_encoder_has_nothing_to_do() -> None:
    async def scenario(cluster: SimCluster) -> None:
        asks = [replace(about(image(1), f"r{number}"), at_s=number / 50) for number in range(8)]
        check_right(await play(cluster.router, asks))
        assert encoded(cluster) == 1

    simulate(SLOW, scenario)


def test_an_encoder_that_starts_again_is_not_believed_to_hold_anything() -> None:
    async def scenario(cluster: SimCluster) -> None:
        async with another_router(cluster) as other:
            for attempt in range(3):
                for router in (cluster.router, other):
                    asks = [about_image(number, f"{attempt}.") for number in range(20)]
                    replies = await play(router, asks)
                    check_right(replies)
                    assert not router.cluster.machine.instances.in_backoff()
                victim = cluster.encoders[attempt]
                await victim.kill()
                await victim.start()
                await asyncio.sleep(2.0)
            # What the others held was not encoded again.
            assert encoded(cluster) < 4 * 20

    simulate(replace(SLOW, encode_token_s=0.0005), scenario)


class Unreliable(LinkedInstance):
    """Hints of some reports are lost, delayed behind the next ones, or come twice."""

    rng = Random(5)

    async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        late: list[InstanceLoad] = []
        async with aclosing(super().watch_load()) as loads:
            async for load in loads:
                match self.rng.randrange(6) if load.hints is not None else None:
                    case 0:
                        yield replace(load, hints=None)
                    case 1:
                        late.append(load)
                        yield replace(load, hints=None)
                    case 2:
                        yield load
                        yield load
                    case _:
                        yield load
                        while late:
                            yield late.pop()


@pytest.mark.parametrize("seed", range(2))
def test_hints_that_are_lost_late_or_wrong_never_fail_a_request_nor_count_as_failures(seed: int) -> None:
    """Arenas that evict all the time, so that hints are soon wrong."""

    async def scenario(cluster: SimCluster) -> None:
        async with another_router(cluster, client=Unreliable) as other:
            asks = [make_asks(seed + place, 80, rate_per_s=60, images=(1, 3)) for place in range(2)]
            asks[1] = [
                replace(ask, request=replace(ask.request, request_id=f"o{ask.request.request_id}")) for ask in asks[1]
            ]
            for router, replies in zip(
                (cluster.router, other), await play_both(cluster.router, other, *asks), strict=True
            ):
                router.cluster.validate()
                assert not router.cluster.machine.instances.in_backoff()
                for reply in replies:
                    told = await router.timeline(reply.ask.request.request_id)
                    assert {item.encode_attempts for item in told.items} == {1}

    simulate(World(seed=seed, encoders=3, encoder_arena_bytes=MIB // 64), scenario)
