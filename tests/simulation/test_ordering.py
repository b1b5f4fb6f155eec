"""The order of requests under overload: the real services under virtual time, with equal timeouts unless said otherwise."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, check_right_or, now_s, simulate
from tests.simulation.workload import Ask, Reply, play
from triptych.domain.chat import ChatRequest, MediaPart, Message, TextPart
from triptych.domain.media import Modality
from triptych.domain.queue_position import AGEING_S
from triptych.domain.sampling import SamplingParams
from triptych.errors import DeadlineExceeded
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.policy.policies import PolicyNames
from triptych.policy.queueing import AGEING_FACTOR
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.media import png

TIMEOUT_S = 120.0
STEP_S = 0.05
"""A fake answer has 4 to 11 tokens, and one more per image."""


def asked(
    name: str,
    at_s: float = 0.0,
    *,
    sides_px: Sequence[int] = (),
    timeout_s: float = TIMEOUT_S,
    priority: int = 0,
    seed: int = 0,
) -> Ask:
    images = [MediaPart(Modality.IMAGE, png(side, side, seed=100 * seed + at)) for at, side in enumerate(sides_px)]
    message = Message("user", (*images, TextPart(f"w5 w{6 + seed}")))
    sampling = SamplingParams(temperature=0, max_tokens=40)
    request = ChatRequest(
        f"{name}-{seed}", FAKE_MODEL.model_id, (message,), sampling, timeout_s=timeout_s, priority=priority
    )
    return Ask(at_s, request)


def replies(world: World, asks: list[Ask]) -> tuple[list[Reply], float]:
    """The clients' results, and when the first request was sent."""
    found: list[Reply] = []
    began_s = 0.0

    async def scenario(cluster: SimCluster) -> None:
        nonlocal began_s
        began_s = now_s()
        found.extend(await play(cluster.router, asks))

    simulate(world, scenario)
    return found, began_s


def latencies_s(world: World, asks: list[Ask]) -> dict[str, list[float]]:
    """By the requests' names, how long each took, in order of arrival. Every one has its right answer."""
    found, began_s = replies(world, asks)
    check_right(found)
    by_name: dict[str, list[float]] = {}
    for reply in found:
        name = reply.ask.request.request_id.partition("-")[0]
        by_name.setdefault(name, []).append(reply.ended_s - began_s - reply.ask.at_s)
    return by_name


def routed(ordering: str, *slo: str) -> dict[str, Any]:
    return {"slo": slo, "policies": PolicyNames(ordering=ordering)}


def test_text_passes_images_that_wait_for_the_engine_and_these_do_not_starve() -> None:
    asks = [asked("image", sides_px=(224,), seed=number) for number in range(40)]
    asks += [asked("text", 1.0 + number, seed=number) for number in range(20)]

    def taken(ordering: str) -> dict[str, list[float]]:
        router = routed(ordering, "text:ttft=3s", "image:ttft=25s")
        return latencies_s(World(seed=1, max_running=1, text_step_s=STEP_S, router=router), asks)

    by_slo, by_deadline = taken("slo"), taken("deadline")
    assert max(by_slo["text"]) < 3.0
    assert mean(by_deadline["text"]) > 5 * mean(by_slo["text"]), "with equal timeouts deadlines are order of arrival"
    assert max(by_slo["image"]) < AGEING_S


def test_a_small_image_passes_large_requests_that_wait_for_room_and_for_the_encoder() -> None:
    """Of the large ones the arena holds one at a time; the others wait at the router."""
    asks = [asked("large", sides_px=(224,) * 8, seed=number) for number in range(12)]
    asks += [asked("small", 1.0 + number, sides_px=(28,), seed=100 + number) for number in range(20)]

    def taken(ordering: str) -> dict[str, list[float]]:
        world = World(
            seed=2,
            encoders=1,
            encoder_arena_bytes=128 << 10,
            encode_token_s=0.001,
            encoder={"batches": BatchLimits(max_batch_items=1)},
            router=routed(ordering, "image-256:ttft=3s", "image-4096:ttft=25s"),
        )
        return latencies_s(world, asks)

    by_slo, by_deadline = taken("slo"), taken("deadline")
    assert max(by_slo["small"]) < 3.0
    assert mean(by_deadline["small"]) > 5 * mean(by_slo["small"])
    assert max(by_slo["large"]) < 1.2 * max(by_deadline["large"]) + 3.0


def test_requests_that_are_lost_do_not_make_those_behind_them_late_and_are_served_later() -> None:
    """20 requests at once are 7 s of work; of those that come later most can still be served in time."""
    asks = [asked("burst", seed=number) for number in range(20)]
    asks += [asked("later", 1.0 + number, seed=100 + number) for number in range(20)]

    def in_time(ordering: str) -> int:
        world = World(seed=3, max_running=1, text_step_s=STEP_S, router=routed(ordering, "text:ttft=3s"))
        found = latencies_s(world, asks)
        assert max(found["burst"]) < AGEING_FACTOR * 3.0, "none came in time to pass it then"
        return sum(latency_s < 3.0 for latency_s in found["later"])

    assert in_time("deadline") <= 14
    assert in_time("slo") >= 18


def test_a_shorter_deadline_of_the_caller_wins_over_the_objective() -> None:
    asks = [asked("patient", seed=number) for number in range(30)]
    asks.append(asked("hurried", 1.0, timeout_s=3.0, seed=100))

    def failed(ordering: str) -> list[str]:
        world = World(seed=4, max_running=1, text_step_s=STEP_S, router=routed(ordering, "text:ttft=20s"))
        found, _ = replies(world, asks)
        return [reply.ask.request.request_id for reply in check_right_or(found, DeadlineExceeded)]

    assert failed("first-come") == ["hurried-100"]
    assert failed("slo") == []


@pytest.mark.parametrize("ordering", ["slo", "deadline", "first-come"])
def test_a_lower_priority_number_passes_whatever_is_due(ordering: str) -> None:
    asks = [asked("usual", seed=number) for number in range(30)]
    asks.append(asked("high", 1.0, sides_px=(224,), priority=-1, seed=100))
    router = routed(ordering, "text:ttft=3s", "image:ttft=25s")
    found = latencies_s(World(seed=5, max_running=1, text_step_s=STEP_S, router=router), asks)
    assert found["high"][0] < 2.5
