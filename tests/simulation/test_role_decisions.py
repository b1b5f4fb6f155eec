"""Pool managers that let instances switch roles, over the real services: nothing fails, and no stage loses its last instance."""

import asyncio

from benchmarks.switching import FIVE_TWO, Kind, Load, asks_of, world
from tests.simulation.cluster import SimCluster
from tests.simulation.test_cluster import check_right, play_while, simulate
from triptych.domain.stage import Role

SHIFT = Load("shift", (Kind(3, 1, 5), Kind(3, 1, 240)), counts=(10, 26))


def roles(cluster: SimCluster) -> list[Role]:
    return [Role.of(node.instance.load().stages.keys()) for node in cluster.switching]


def test_encoders_become_decode_instances_when_answers_become_long() -> None:
    """The shift of EPD-Serve's experiment, with shorter answers; every answer is right."""
    asks = asks_of(SHIFT, 1)

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play_while(cluster, asks, asyncio.sleep(0)))
        assert roles(cluster).count(Role.D) > FIVE_TWO.count(Role.D)
        assert roles(cluster).count(Role.E) >= 2
        told = [await cluster.router.timeline(ask.request.request_id) for ask in asks]
        assert not any(timeline.continuations for timeline in told)

    simulate(world(FIVE_TWO, 1, switches=True), scenario)


def test_without_the_setting_no_role_changes() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play_while(cluster, asks_of(SHIFT, 1)[:20], asyncio.sleep(0)))
        assert tuple(roles(cluster)) == FIVE_TWO

    simulate(world(FIVE_TWO, 1, switches=False), scenario)
