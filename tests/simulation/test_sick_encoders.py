"""Encoders that fail, or answer wrongly: they get less work, and every request ends in its right answer or one clear error."""

import asyncio
from random import Random

import pytest

from tests.examples import seeds
from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, check_right_or, play_while, simulate
from tests.simulation.workload import make_asks, play
from triptych.domain.embedding import Ticket
from triptych.errors import DeadlineExceeded, EngineFailure, InternalError, Unavailable
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.virtual.links import Fault

FAILS = [EngineFailure("on purpose") for _ in range(3000)]


def encodes(cluster: SimCluster, name: str = "e") -> int:
    """Calls that encode, at the encoders whose names begin so."""
    return sum(link.startswith(f"router->{name}") and method == "encode" for _, link, method in cluster.decisions)


def test_an_encoder_whose_embeddings_are_damaged_is_avoided_and_all_answers_are_right() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, make_asks(1, 200, distinct_images=800)))
        assert 0 < encodes(cluster, "e0") < encodes(cluster) / 8

    simulate(World(seed=1, encoders=3, damage=lambda ticket: ticket.holder == "e0"), scenario)


def test_an_encoder_that_fails_is_avoided_and_used_again_when_it_works() -> None:
    async def scenario(cluster: SimCluster) -> None:
        sick = cluster.encoders[0]
        sick.engine.failures.extend(FAILS)

        async def heal() -> None:
            await asyncio.sleep(4)
            assert encodes(cluster, "e0") < encodes(cluster) / 8
            sick.engine.failures.clear()

        asks = make_asks(2, 600, rate_per_s=50, distinct_images=1600)
        check_right(await play_while(cluster, asks, heal()))
        assert sick.engine.encoded_items > 50

    simulate(World(seed=2, encoders=3), scenario)


def test_when_every_encoder_fails_the_load_is_not_multiplied() -> None:
    async def scenario(cluster: SimCluster) -> None:
        for node in cluster.encoders:
            node.engine.failures.extend(FAILS)
        asks = make_asks(3, 100, images=(1, 1), distinct_images=400)
        replies = await play(cluster.router, asks)
        assert len(check_right_or(replies, EngineFailure, Unavailable)) == 100
        assert sum(isinstance(reply.error, Unavailable) for reply in replies) >= 90
        assert encodes(cluster) <= 110

    limits = ClusterLimits(retry_burst=10)
    simulate(World(seed=3, router={"cluster": limits}), scenario)


@pytest.mark.parametrize("seed", seeds(12, usual=4))
def test_with_any_sick_encoders_every_request_ends_and_nothing_leaks(seed: int) -> None:
    """Some of them fail, damage what they hold, break their calls, or answer so late that nobody waits any more."""
    rng = Random(f"{seed}/sick")
    sick = rng.sample(["e0", "e1", "e2"], rng.randint(1, 2))
    damaging, breaking = rng.random() * rng.choice((0, 1)), rng.random() * rng.choice((0, 0.5))
    failing, slow = rng.random() * rng.choice((0, 1)), rng.choice((1, 1, 10, 100))

    def damage(ticket: Ticket) -> bool:
        return ticket.holder in sick and rng.random() < damaging

    def fault(link: str, method: str) -> Fault:
        if method != "encode" or link.removeprefix("router->") not in sick or rng.random() >= breaking:
            return Fault.NONE
        return rng.choice((Fault.REQUEST_LOST, Fault.REPLY_LOST))

    async def scenario(cluster: SimCluster) -> None:
        for node in cluster.encoders:
            if node.name in sick:
                node.engine.token_s *= slow
                node.engine.batch_s *= slow

        async def fail() -> None:
            for _ in range(40):
                await asyncio.sleep(0.05)
                for node in cluster.encoders:
                    if node.name in sick and rng.random() < failing:
                        node.engine.failures.append(EngineFailure("on purpose"))
            for node in cluster.encoders:
                node.engine.failures.clear()

        asks = make_asks(seed, 150, distinct_images=600, timeout_s=20.0)
        replies = await play_while(cluster, asks, fail())
        check_right_or(replies, InternalError, Unavailable, DeadlineExceeded)
        assert sum(reply.error is None for reply in replies) >= 100

    simulate(World(seed=seed, encoders=3, damage=damage, fault=fault), scenario)
