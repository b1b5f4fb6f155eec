"""Instances that switch between roles while they serve: no request fails, every answer is right, and nothing stays behind."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, play_while, simulate
from tests.simulation.workload import make_asks, play
from triptych.domain.pool import MemberStatus
from triptych.domain.stage import Role, Stage
from triptych.errors import Conflict, FailedPrecondition, InvalidRequest

SWITCHES = 200
ONE = World(encoders=1, texts=0, prefills=1, decodes=1, switching=1)
"""An instance of each stage that stays, and one that switches."""


@pytest.mark.parametrize("seed", range(2))
def test_many_switches_under_load_cost_no_request(seed: int) -> None:
    asks = make_asks(seed, 200, images=(0, 3), rate_per_s=40.0)

    async def scenario(cluster: SimCluster) -> None:
        draw = Random(seed)

        async def switch() -> None:
            for number in range(SWITCHES):
                await asyncio.sleep(draw.choice((0.0, 0.01, 0.05)))
                node, role = draw.choice(cluster.switching), draw.choice(list(Role))
                node.switching.set_stages(role.stages, number + 1, "a test")

        check_right(await play_while(cluster, asks, switch()))
        assert not cluster.router.cluster.machine.instances.in_backoff(), "a stage that closes is no failure"

    simulate(replace(ONE, switching=2, seed=seed), scenario)


def test_routers_follow_at_once_and_what_opens_gets_work() -> None:
    async def scenario(cluster: SimCluster) -> None:
        (node,) = cluster.switching
        for version, role in enumerate((Role.E, Role.P, Role.D, Role.EPD), 1):
            node.switching.set_stages(role.stages, version, "a test")
            await asyncio.sleep(0.1)
            assert set(node.instance.load().stages) == role.stages
            assert ("s0" in cluster.router.cluster.encoders.name) is role.serves(Stage.ENCODE)
            encoded = node.encoder.engine.encoded_items
            asks = make_asks(version, 30, images=(1, 2), rate_per_s=None, distinct_images=500)
            asks = [
                replace(ask, request=replace(ask.request, request_id=f"{version}-{i}")) for i, ask in enumerate(asks)
            ]
            check_right(await play(cluster.router, asks))
            told = [await cluster.router.timeline(ask.request.request_id) for ask in asks]
            assert (node.encoder.engine.encoded_items > encoded) is role.serves(Stage.ENCODE)
            prefilled = any("s0" in (timeline.prefill_instance or timeline.text_instance) for timeline in told)
            assert prefilled is role.serves(Stage.PREFILL)
            assert any(timeline.text_instance == "s0" for timeline in told) is role.serves(Stage.DECODE)

    simulate(ONE, scenario)


def test_answers_that_are_decoded_go_on_elsewhere_when_their_stage_closes() -> None:
    asks = make_asks(5, 40, images=(0, 1), rate_per_s=None)

    async def scenario(cluster: SimCluster) -> None:
        (node,) = cluster.switching

        async def switch() -> None:
            while True:
                await asyncio.sleep(0.01)
                if node.service.load().at(Stage.DECODE).pending > 2:
                    break
            node.switching.set_stages(Role.P.stages, 1, "a test")

        check_right(await play_while(cluster, asks, switch()))
        told = [await cluster.router.timeline(ask.request.request_id) for ask in asks]
        assert not any(timeline.continuations for timeline in told)
        moved = [timeline for timeline in told if timeline.prefill_instance == "s0" and timeline.text_instance == "d0"]
        assert moved

    simulate(ONE, scenario)


def test_one_that_starts_again_has_its_first_role_and_knows_no_order() -> None:
    async def scenario(cluster: SimCluster) -> None:
        (node,) = cluster.switching
        node.switching.set_stages(Role.E.stages, 7, "a test")
        for stages, version, error in ((Role.P.stages, 7, Conflict), (frozenset[Stage](), 8, InvalidRequest)):
            with pytest.raises(error):
                node.switching.set_stages(stages, version, "a test")
        await asyncio.sleep(0.1)
        assert cluster.router.cluster.machine.instances.states()["E", "ready"] == 2
        await node.kill()
        await node.start()
        await asyncio.sleep(5)
        assert cluster.router.cluster.machine.instances.states()["PD", "ready"] == 1
        assert node.instance.load().stages_version == 0
        check_right(await play(cluster.router, make_asks(1, 20)))

    simulate(ONE, scenario)


def test_a_pool_manager_orders_it_and_says_when_it_is_so() -> None:
    asks = make_asks(9, 60, images=(0, 2), rate_per_s=20.0)

    async def scenario(cluster: SimCluster) -> None:
        manager = cluster.managers["m0:1"].way("operator")

        async def member() -> MemberStatus:
            members = [member for pool in (await manager.status()).pools for member in pool.members]
            return next(member for member in members if member.registration.instance_id == "s0")

        async def switch() -> None:
            await asyncio.sleep(0.5)
            for role in (Role.P, Role.D, Role.E, Role.EPD, Role.PD):
                await manager.switch_instance("s0", role, force=False)
                assert (await member()).wanted is role
                await asyncio.sleep(1.0)
                told = await member()
                assert (told.open, told.is_as_wanted) == (role.stages, True)
                assert told.registration.role is Role.PD, "its pool stays"

        check_right(await play_while(cluster, asks, switch()))
        await manager.switch_instance("s0", Role.P, force=False)
        with pytest.raises(FailedPrecondition, match="d0 is the last decode instance"):
            await manager.drain_instance("d0", force=False)

    simulate(replace(ONE, managers=1), scenario)
