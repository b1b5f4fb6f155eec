"""Instances that pull the beginnings of their prompts from others: the answers are those of one that computes all, whatever breaks."""

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, play_while, simulate
from tests.simulation.workload import Ask, play
from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, TextPart
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.policy.policies import PolicyNames
from triptych.testing.damage import SomeDamaged
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.media import png
from triptych.testing.model import WORDS
from triptych.virtual.links import Fault

TOLD: dict[str, Any] = {"policies": PolicyNames(prefixes="always", text_routing="round-robin")}
KEPT: dict[str, Any] = {"kv_prefixes": True}
SHARED = World(texts=3, router=TOLD, text=KEPT)


def words(rng: Random, count: int) -> str:
    return " ".join(f"w{rng.choice(WORDS)}" for _ in range(count))


def make_turns(seed: int, count: int, *, salts: tuple[bytes, ...] = (b"",), gap_s: float = 0.05) -> list[Ask]:
    """Requests with few beginnings: a long text, and in every second one an image as well."""
    rng = Random(seed)
    beginnings = [words(rng, 150) for _ in range(2)]
    image = png(40, 40, seed=seed)
    asks: list[Ask] = []
    for number in range(count):
        parts: list[Part] = [TextPart(rng.choice(beginnings))]
        if number % 2:
            parts.append(MediaPart(Modality.IMAGE, image))
        parts.append(TextPart(words(rng, rng.randint(20, 60))))
        sampling = SamplingParams(temperature=0, max_tokens=rng.choice((3, 40)), n=rng.choice((1, 1, 2)))
        request = ChatRequest(
            f"r{number}", FAKE_MODEL.model_id, (Message("user", tuple(parts)),), sampling, tenant_salt=rng.choice(salts)
        )
        asks.append(Ask(number * gap_s, request))
    return asks


async def pulled(cluster: SimCluster, asks: list[Ask]) -> list[int]:
    """Positions that each request has pulled."""
    told = [await cluster.router.timeline(ask.request.request_id) for ask in asks]
    return [timeline.prefix_tokens for timeline in told]


@pytest.mark.parametrize("seed", range(2))
def test_a_known_beginning_is_pulled(seed: int) -> None:
    asks = make_turns(seed, 24)

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        tokens = await pulled(cluster, asks)
        assert sum(pulled_tokens > 0 for pulled_tokens in tokens) >= 4, tokens
        assert max(tokens) >= 144
        assert cluster.router.cluster.prefix_leases["granted"]

    simulate(replace(SHARED, seed=seed), scenario)


@pytest.mark.parametrize(
    "world",
    [
        replace(SHARED, texts=0, prefills=2, decodes=2),
        replace(SHARED, encoders=0, texts=0, hybrids=3, chunk_tokens=64),
        replace(SHARED, kv_arena_bytes=8 << 10),
    ],
    ids=["prefill and decode apart", "with encoders", "little room"],
)
def test_answers_are_right_whatever_the_roles_and_the_room(world: World) -> None:
    asks = make_turns(5, 24)

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        assert sum(await pulled(cluster, asks)) > 0

    simulate(world, scenario)


def test_an_answer_is_part_of_what_is_known() -> None:
    """The next turn of a chat begins with the prompt and the answer of the turn before."""
    rng = Random(9)
    first = Ask(
        0.0,
        ChatRequest(
            "first",
            FAKE_MODEL.model_id,
            (Message("user", (TextPart(words(rng, 40)),)),),
            SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        ),
    )

    async def scenario(cluster: SimCluster) -> None:
        (reply,) = await play(cluster.router, [first])
        reply.check_right()
        await asyncio.sleep(0.1)
        answer = Message("assistant", (TextPart(" ".join(f"w{token}" for token in reply.answers[0].token_ids)),))
        messages = (*first.request.messages, answer, Message("user", (TextPart("w17 w18 w19"),)))
        then = Ask(0.0, replace(first.request, request_id="then", messages=messages))
        check_right(await play(cluster.router, [then]))
        (tokens,) = await pulled(cluster, [then])
        prompt = (await cluster.router.timeline("first")).prompt_tokens
        assert tokens > prompt, "the answer too"

    simulate(SHARED, scenario)


def test_nothing_is_looked_for_unless_the_policy_says_so() -> None:
    asks = make_turns(6, 12)

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        assert not any(await pulled(cluster, asks))
        assert cluster.router.cluster.prefix_leases == {"granted": 0, "refused": 0}

    simulate(replace(SHARED, router={"policies": PolicyNames(text_routing="round-robin")}), scenario)


def test_tenants_share_nothing() -> None:
    salts = tuple(b"tenant %d" % number for number in range(12))
    asks = [
        replace(ask, request=replace(ask.request, tenant_salt=salt))
        for ask, salt in zip(make_turns(7, 12), salts, strict=True)
    ]

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        assert not any(await pulled(cluster, asks))
        assert cluster.router.cluster.prefix_leases == {"granted": 0, "refused": 0}

    simulate(SHARED, scenario)


def test_stale_hints_cost_a_lease_each() -> None:
    asks = make_turns(8, 24)

    async def scenario(cluster: SimCluster) -> None:
        for node in cluster.texts:
            assert node.store is not None
            node.store.on_evicted(lambda _: None)  # routers do not hear of it
        check_right(await play(cluster.router, asks))
        assert cluster.router.cluster.prefix_leases["refused"]

    simulate(replace(SHARED, kv_arena_bytes=8 << 10), scenario)


@pytest.mark.parametrize("fault", [Fault.REQUEST_LOST, Fault.REPLY_LOST])
def test_answers_are_right_where_leases_are_lost(fault: Fault) -> None:
    asks = make_turns(10, 24)
    count = 0

    def lose(_: str, method: str) -> Fault:
        nonlocal count
        count += method == "lease"
        return fault if method == "lease" and count % 3 == 0 else Fault.NONE

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        assert cluster.router.cluster.prefix_leases["refused"]

    simulate(replace(SHARED, fault=lose), scenario)


def test_damaged_beginnings_are_computed() -> None:
    asks = make_turns(11, 24)
    damage = SomeDamaged("t", one_of=5)

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        assert damage.count

    simulate(replace(SHARED, damage=damage), scenario)


@pytest.mark.parametrize("at_s", [0.33, 0.501])
def test_a_holder_that_dies_costs_no_answer(at_s: float) -> None:
    asks = make_turns(12, 24)

    async def scenario(cluster: SimCluster) -> None:
        async def kill() -> None:
            await asyncio.sleep(at_s)
            await cluster.processes["t0"].kill()

        check_right(await play_while(cluster, asks, kill()))

    simulate(SHARED, scenario)


def test_one_that_drains_transfers_kv_what_it_keeps_as_well() -> None:
    asks = make_turns(13, 24, gap_s=0.02)

    async def scenario(cluster: SimCluster) -> None:
        async def drain() -> None:
            await asyncio.sleep(0.25)
            await cluster.processes["t1"].drain()

        check_right(await play_while(cluster, asks, drain()))

    simulate(replace(SHARED, text=KEPT | {"transfer_kv_on_drain": True}), scenario)
