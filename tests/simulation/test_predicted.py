"""Routing by predicted time, under virtual time: beside the least load where instances differ, and right under faults."""

import asyncio
from dataclasses import replace
from random import Random
from statistics import mean
from typing import Any

import pytest

from tests.simulation.cluster import EncoderNode, SimCluster, TextNode, World
from tests.simulation.test_cluster import check_right, play_while, simulate
from tests.simulation.workload import Ask, make_asks, play
from triptych.domain.chat import ChatRequest, MediaPart, Message, TextPart
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.timeline import Timeline
from triptych.policy.policies import PolicyNames
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.media import png
from triptych.virtual.links import Fault

PULL_BYTE_S = 1e-5


def routed(policy: str) -> dict[str, Any]:
    return {"policies": PolicyNames(encoder_routing=policy, text_routing=policy)}


def timelines(world: World, asks: list[Ask]) -> list[Timeline]:
    """Of requests that all have their right answers."""
    found: list[Timeline] = []

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        found.extend([await cluster.router.timeline(ask.request.request_id) for ask in asks])

    simulate(world, scenario)
    return found


@pytest.mark.parametrize(
    "profiled",
    [pytest.param(True, id="by profiles", marks=pytest.mark.extended), pytest.param(False, id="by measured times")],
)
def test_where_instances_differ_requests_are_answered_sooner_than_by_the_least_load(profiled: bool) -> None:
    took_s = {"least-loaded": 0.0, "predicted": 0.0}
    for seed in range(5, 8):
        asks = make_asks(seed, 200, rate_per_s=60.0, images=(0, 2), distinct_images=500)
        world = World(
            seed=seed, encoders=3, texts=3, encode_token_s=0.003, profiled=profiled, slower={"e0": 4.0, "t0": 4.0}
        )
        for policy in took_s:
            took_s[policy] += mean(
                timeline.ttft_s for timeline in timelines(replace(world, router=routed(policy)), asks)[80:]
            )
    assert took_s["predicted"] < 0.85 * took_s["least-loaded"]


def asked(number: int, at_s: float, sides_px: tuple[int, ...], words: int = 1) -> Ask:
    images = [MediaPart(Modality.IMAGE, png(side, side, seed=100 * number + at)) for at, side in enumerate(sides_px)]
    text = TextPart(" ".join(["w5"] * words))
    sampling = SamplingParams(temperature=0, max_tokens=8)
    return Ask(at_s, ChatRequest(f"r{number}", FAKE_MODEL.model_id, (Message("user", (*images, text)),), sampling))


def encoded_at(found: list[Timeline]) -> set[str]:
    return {item.encoder[0] for timeline in found for item in timeline.items}


def apart(policy: str, **changes: Any) -> World:
    """Encoders, and instances that do all."""
    world = World(seed=6, encoders=2, texts=0, hybrids=2, pull_byte_s=PULL_BYTE_S, profiled=True, router=routed(policy))
    return replace(world, **changes)


def test_a_single_small_image_is_encoded_where_its_text_is_computed() -> None:
    asks = [asked(number, 0.3 * number, (56,)) for number in range(20)]
    here, spread = timelines(apart("predicted"), asks), timelines(apart("least-loaded"), asks)
    assert all(timeline.items[0].encoder == timeline.text_instance for timeline in here)
    assert encoded_at(spread) == {"e", "h"}
    assert mean(timeline.ttft_s for timeline in here) < mean(timeline.ttft_s for timeline in spread)


def test_many_images_are_encoded_by_all_that_can() -> None:
    asks = [asked(number, 2.0 * number, (112,) * 12) for number in range(6)]
    slow = {"encode_token_s": 0.002, "pull_byte_s": PULL_BYTE_S / 10}
    both, alone = timelines(apart("predicted", **slow), asks), timelines(apart("predicted", **slow, encoders=0), asks)
    assert encoded_at(both) == {"e", "h"}
    assert mean(timeline.ttft_s for timeline in both) < 0.8 * mean(timeline.ttft_s for timeline in alone)


def test_while_prompts_wait_at_the_text_instances_images_go_to_the_encoders() -> None:
    prompts = [asked(1000 + number, 0.0, (), words=1500) for number in range(40)]
    images = [asked(number, 0.1 + 0.02 * number, (56,)) for number in range(10)]
    found = timelines(apart("predicted"), [*prompts, *images])
    assert encoded_at(found[len(prompts) :]) == {"e"}


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_every_request_is_answered_rightly_and_nothing_is_left(seed: int) -> None:
    """By profiles, or by times that are learned meanwhile; each kind of instance has a spare."""
    rng = Random(f"{seed}/faults")

    def lost(link: str, method: str) -> Fault:
        broken = method in {"encode", "lease"} and rng.random() < 0.03
        return Fault.REPLY_LOST if broken and link.startswith("router") else Fault.NONE

    async def scenario(cluster: SimCluster) -> None:
        async def trouble() -> None:
            for _ in range(4):
                await asyncio.sleep(0.4)
                nodes: list[EncoderNode | TextNode] = [*cluster.hybrids, *cluster.encoders[:2]]
                node = rng.choice(nodes)
                await node.kill()
                await asyncio.sleep(0.4)
                await node.start()

        asks = make_asks(seed, 120, rate_per_s=40.0, images=(0, 3), distinct_images=60)
        check_right(await play_while(cluster, asks, trouble()))

    world = World(
        seed=seed,
        encoders=3,
        texts=1,
        hybrids=2,
        fault=lost,
        pull_byte_s=1e-7,
        profiled=bool(seed % 2),
        slower={"e0": 3.0},
        router=routed("predicted"),
    )
    simulate(world, scenario)
