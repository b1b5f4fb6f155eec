"""Equal images through several routers under virtual time: each is encoded once."""

import asyncio
from dataclasses import replace

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, simulate
from tests.simulation.workload import Ask, make_asks, play
from triptych.domain.chat import MediaPart, Message
from triptych.domain.media import Modality
from triptych.testing.media import png


def about(image: bytes, name: str) -> Ask:
    (ask,) = make_asks(1, 1, images=(0, 0))
    words = ask.request.messages[0].parts
    message = Message("user", (MediaPart(Modality.IMAGE, image), *words))
    return replace(ask, at_s=0.0, request=replace(ask.request, request_id=name, messages=(message,)))


@pytest.mark.parametrize("seed", range(4))
def test_the_same_image_through_two_routers_at_once_is_encoded_once(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        other = cluster.make_router(cluster.source, cluster.connect, name="other")
        try:
            async with asyncio.timeout(10):
                while len((await other.readiness()).instances) < len(cluster.processes):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            images = [png(56, 56, seed=1000 * seed + number) for number in range(30)]
            for number, image in enumerate(images):
                async with asyncio.TaskGroup() as group:
                    playing = [
                        group.create_task(play(router, [about(image, f"{name}{number}")]))
                        for name, router in (("one", cluster.router), ("other", other))
                    ]
                for player in playing:
                    check_right(player.result())
                encoded = [node.engine.encoded_items for node in cluster.encoders]
                assert sum(encoded) == number + 1
                await asyncio.sleep(1.0)  # until all routers know that the encoders are idle
            assert min(encoded) > 0, "all encoders take part"
            assert not other.cluster.machine.outstanding
            assert not other.running
        finally:
            other.close()

    simulate(World(seed=seed, encoders=3), scenario)
