"""Encoders that lend their idle time to text requests, under virtual time: vision first, right answers, and what it is worth."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.simulation.cluster import Engines, SimCluster, World
from tests.simulation.scaling import profile_of_decoder, profile_of_encoder
from tests.simulation.test_cluster import check_right, play_while, simulate
from tests.simulation.workload import Ask, make_asks, play
from triptych.domain.chat import ChatRequest, MediaPart, Message, TextPart
from triptych.domain.engine import EngineOutput
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.timeline import Timeline
from triptych.engine.decoder.options import EngineOptions
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.policy.iteration import ImageBudget
from triptych.policy.policies import PolicyNames
from triptych.runtime.metrics import Metrics
from triptych.services.router import gauges
from triptych.testing import fake_kv, fakes
from triptych.testing.fakes import FAKE_MODEL, FakeEncoderEngine, FakeTextEngine
from triptych.testing.media import png
from triptych.testing.model import WORDS, FakeFamily

NEVER = 1 << 20
"""Requests that never wait."""


def lending(above: int, most: int = 8, routing: str = "least-loaded") -> dict[str, Any]:
    """Settings of the router."""
    return {
        "policies": PolicyNames(encoder_routing=routing, text_routing=routing, lending="idle", deadlines="admit"),
        "cluster": ClusterLimits(lend_above=above, max_lent=most),
    }


def beside(above: int, **changes: Any) -> World:
    """One text instance, and an encoder that lends."""
    world = World(
        seed=1,
        encoders=0,
        texts=1,
        hybrids=1,
        max_running=4,
        text_step_s=0.02,
        router=lending(above),
        text={"encode_first": True},
    )
    return replace(world, **changes)


def texts(found: list[Timeline]) -> set[str]:
    return {timeline.text_instance for timeline in found}


async def timelines(cluster: SimCluster, asks: list[Ask]) -> list[Timeline]:
    return [await cluster.router.timeline(ask.request.request_id) for ask in asks]


@pytest.mark.parametrize("above", [8, NEVER])
def test_encoders_take_what_waits_and_the_answers_are_right(above: int) -> None:
    asks = make_asks(1, 60, rate_per_s=None, images=(0, 1))

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        found = await timelines(cluster, asks)
        assert texts(found) == ({"t0"} if above == NEVER else {"t0", "h0"})
        assert all(timeline.text_attempts == 1 for timeline in found)
        started = [link for _, link, method in cluster.decisions if method == "generate" and link.startswith("router")]
        assert (len(started) > len(asks)) is (above != NEVER), "some waited elsewhere before"
        metrics = Metrics()
        gauges.watch(metrics, cluster.router)
        read = metrics.registry.get_sample_value
        assert bool(read("triptych_lent_requests_total", {"how": "moved"})) is (above != NEVER)
        assert read("triptych_requests_lent") == 0
        assert read("triptych_lenders", {"state": "encode only"}) == 1

    simulate(beside(above), scenario)


def test_an_encoder_that_dies_loses_no_answer() -> None:
    asks = make_asks(2, 80, rate_per_s=None, images=(0, 1))

    async def scenario(cluster: SimCluster) -> None:
        (lender, other) = cluster.hybrids

        async def die() -> None:
            while lender.engine.pending_tokens == 0:  # noqa: ASYNC110  # virtual time
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert lender.engine.has_work
            await lender.kill()

        check_right(await play_while(cluster, asks, die()))
        assert any(timeline.continuations for timeline in await timelines(cluster, asks))
        assert not other.engine.has_work

    simulate(beside(4, hybrids=2), scenario)


BUDGET = ImageBudget(tokens=32, nbytes=1 << 20)
BATCH_S, STEP_S = FakeEncoderEngine.batch_s + BUDGET.tokens * World.encode_token_s, 0.02


def encode_times(above: int) -> list[float]:
    """Of images that come while text requests wait, from the queue to the end."""
    prompts = make_asks(3, 150, rate_per_s=None, images=(0, 0))
    images = [
        replace(ask, request=replace(ask.request, request_id=f"i{number}"), at_s=0.5 + 0.13 * number)
        for number, ask in enumerate(make_asks(4, 30, images=(1, 1), distinct_images=500))
    ]
    found: list[Timeline] = []

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, [*prompts, *images]))
        found.extend(await timelines(cluster, images))
        lent = "h0" in texts(await timelines(cluster, prompts))
        assert lent is (above != NEVER)

    simulate(beside(above, image_budget=BUDGET), scenario)
    return sorted(item.queue_s + item.encode_s for timeline in found for item in timeline.items)


def test_an_image_waits_for_one_step_and_one_batch_more_than_without_lending() -> None:
    alone, lent = encode_times(NEVER), encode_times(8)
    assert sum(lent) > sum(alone), "they shared the device"
    assert lent[-1] <= alone[-1] + STEP_S + BATCH_S


@pytest.mark.parametrize("slo_s", [0.001, 1.0])
def test_an_answer_whose_tokens_come_too_slowly_goes_on_elsewhere(slo_s: float) -> None:
    asks = make_asks(5, 60, rate_per_s=None, images=(0, 0))

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, asks))
        found = await timelines(cluster, asks)
        left = [timeline for timeline in found if timeline.prefill_instance == "h0"]
        assert bool(left) is (slo_s == 0.001)
        assert {timeline.text_instance for timeline in left} <= {"t0"}

    options = EngineOptions(tpot_slo_s=slo_s)
    simulate(beside(8, text={"encode_first": True, "engine": options}), scenario)


# --- HeteroServe, section 6.5 ----------------------------------------------------------------------------------------

ANSWER_TOKENS = 128
PREFILL_S, DECODE_S, ENCODE_S = 1.24 / 128, 9.35 / 128, 6.82 / 128
"""Of one request on an A100, where 64 are decoded together, and of one image on an RTX 4090 (table 6)."""
TOGETHER, LENT = 64, 8
"""Sequences of a batch: on an A100, and half of those on an RTX 4090 (section 5.3.1)."""
PROMPT_TOKENS, TOKEN_NBYTES, WEIGHTS_NBYTES, BYTES_PER_S = 704, 512 << 10, 14e9, 1e12
"""Keys and values of LLaVA-1.5-7B, its weights, and the memory of an RTX 4090, which bounds its steps."""
A100_STEP_S = DECODE_S * TOGETHER / ANSWER_TOKENS
LENDER_STEP_S = (WEIGHTS_NBYTES + LENT * PROMPT_TOKENS * TOKEN_NBYTES) / BYTES_PER_S
PUBLISHED = 3156 / 2793
SIDE_PX, IMAGE_TOKENS, WORDS_OF_PROMPT = 28, 4, 4
FROM_S, WAVE_S = 8.0, ANSWER_TOKENS * A100_STEP_S + TOGETHER * PREFILL_S
"""What is measured, after all have work: the time in which an A100 answers a full batch."""


@dataclass
class Counted(FakeTextEngine):
    """Counts the tokens that it generates."""

    generated: int = 0

    def decode_step(self) -> list[EngineOutput]:
        outputs = super().decode_step()
        self.generated += len(outputs)
        return outputs


def published() -> Engines:
    """Two kinds of device. A prompt of the simulation is shorter than one of the paper, and takes as long."""
    prompt_tokens = IMAGE_TOKENS + WORDS_OF_PROMPT + 3

    def text(name: str) -> Counted:
        is_lender = name.startswith("h")
        return Counted(
            WORDS,
            max_running=LENT if is_lender else TOGETHER,
            step_s=LENDER_STEP_S if is_lender else A100_STEP_S,
            prefill_token_s=PREFILL_S / prompt_tokens,
        )

    def encoder(_: str) -> FakeEncoderEngine:
        return FakeEncoderEngine(tokens_of=FakeFamily().tokens, batch_s=0.0, token_s=ENCODE_S / IMAGE_TOKENS)

    encoder_profile, decoder_profile = (
        profile_of_encoder(0.0, ENCODE_S / IMAGE_TOKENS),
        profile_of_decoder(A100_STEP_S, PREFILL_S / prompt_tokens),
    )
    return Engines(encoder, text, FakeFamily(), encoder_profile, decoder_profile)


def tokens_per_s(above: int, requests: int) -> float:
    """Of two A100 and two RTX 4090 that have all these requests at once."""
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    prompt = TextPart(" ".join(["w5"] * WORDS_OF_PROMPT))
    asks = [
        Ask(
            0.0,
            ChatRequest(
                f"r{number}",
                FAKE_MODEL.model_id,
                (Message("user", (MediaPart(Modality.IMAGE, png(SIDE_PX, SIDE_PX, seed=number)), prompt)),),
                sampling,
                600.0,
            ),
        )
        for number in range(requests)
    ]
    made: list[int] = []

    async def scenario(cluster: SimCluster) -> None:
        async def measure() -> None:
            for at_s in (FROM_S, WAVE_S):
                await asyncio.sleep(at_s)
                engines = [node.engine for node in cluster.texts]
                made.append(sum(engine.generated for engine in engines if isinstance(engine, Counted)))
                assert cluster.router.running > 2 * (TOGETHER + LENT), "all have work"

        check_right(await play_while(cluster, asks, measure()))

    world = World(
        seed=14,
        encoders=0,
        texts=2,
        hybrids=2,
        encoder_arena_bytes=48 * 192,
        engines=published(),
        router=lending(above, LENT, "predicted"),
        text={"encode_first": True, "stream_interval_s": 0.5},
    )
    simulate(world, scenario)
    return (made[1] - made[0]) / WAVE_S


@pytest.mark.parametrize(
    ("above", "requests", "gain"), [pytest.param(NEVER, 420, 1.0, marks=pytest.mark.extended), (16, 470, PUBLISHED)]
)
def test_lending_is_worth_what_heteroserve_measures(
    above: int, requests: int, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fake_kv, fakes):
        monkeypatch.setattr(module, "answer_length", lambda *_: ANSWER_TOKENS)
    without = 2 * ANSWER_TOKENS / (PREFILL_S + DECODE_S)
    assert tokens_per_s(above, requests) / without == pytest.approx(gain, rel=0.05)
