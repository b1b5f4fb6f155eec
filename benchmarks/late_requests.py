"""Requests that have missed their objective, by order and load: a mixed load on two cores, in virtual time.

Seven of ten requests are text only, the others have 1 to 8 images of 224 pixels: the load of ``benchmarks.versus_vllm``. The real services of
a simulated cluster (``tests.simulation``) serve it, with engines that sleep: an image takes one core 0.3 s, a prompt token 0.5 ms. Loads are shares
of 2.33 requests/s, what ``vllm`` was measured to bear on two cores. Nothing else here was measured.

- ``E+PD``: an encoder and a text instance, one core each. At 110 % of the load the encoder is full.
- ``EPD``: both stages on two cores, of which each has one while both compute; alone, a stage takes 0.65 times as long.

Orders: ``first-come``; ``patient``, where a late request is due again after four times its objective; ``slo``, the one that routers have. No profile is given, so that routers
estimate objectives, as they do in ``versus_vllm``: from requests at a third of the load, before the ones that count. The objective that counts is five times the TTFT alone in
``EPD``. Goodput is the requests within it, per second until the last answer. All orders get the same requests. Times are pooled over the seeds.
"""

import argparse
import asyncio
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any
from unittest.mock import patch

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from tests.simulation.cluster import MIB, Engines, SimCluster, World, running
from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, TextPart
from triptych.domain.generation import TokenChunk
from triptych.domain.media import Modality
from triptych.domain.queue_position import AGEING_S, QueuePosition
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Stage
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.delay import (
    DelayEncoderEngine,
    DelayTextEngine,
    synthetic_decoder_profile,
    synthetic_encoder_profile,
)
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.machine.router.attainment import WindowLimits
from triptych.policy.costs import Costs
from triptych.policy.policies import ORDERINGS, PolicyNames
from triptych.policy.queueing import AGEING_FACTOR, by_slo
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.media import png_outline
from triptych.testing.model import WORDS, FakeFamily
from triptych.virtual import virtual_time
from triptych.virtual.offload import spend
from triptych.workload.report import percentile

CAPACITY_PER_S = 2.33
"""Of ``vllm`` with this load, by ``results/versus_vllm-amd-epyc.json``."""
TEXT_SHARE, MOST_IMAGES, IMAGE_PX, TEXT_TOKENS, ANSWER_TOKENS = 0.7, 8, 224, 64, 32
_PATCH_PX, _CONTEXT = 28, 4096
_IMAGE_TOKENS = (IMAGE_PX // _PATCH_PX) ** 2
_IMAGE_S, _PROMPT_TOKEN_S, _STEP_S = 0.3, 0.0005, 0.015
_TWO_CORES = 0.65
_TEXT_S = 0.05
"""TTFT of text alone."""
_WARM_LOAD, _IDLE_S = 0.33, 20.0
_SLO_FACTOR, _TIMEOUT_S = 5.0, 600.0
SYSTEMS = E_PD, EPD = ("E+PD", "EPD")


def patient(
    *, priority: int, deadline_s: float, arrived_s: float, arrival: int, due_s: float, needs_s: float
) -> QueuePosition:
    """A late request waits longer: for four times its objective."""
    queue_position = by_slo(
        priority=priority, deadline_s=deadline_s, arrived_s=arrived_s, arrival=arrival, due_s=due_s, needs_s=needs_s
    )
    return queue_position._replace(aged_s=arrived_s + min(AGEING_S, AGEING_FACTOR * (due_s - arrived_s)))


ORDERS = ("first-come", "patient", "slo")


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float = 60.0
    """For which requests come that count."""
    seeds: int = 12
    loads: tuple[float, ...] = (0.6, 0.95, 1.1, 1.5)
    systems: tuple[str, ...] = SYSTEMS
    orders: tuple[str, ...] = ORDERS
    warm: int = 80
    """Requests before these."""


QUICK = Settings(seconds=5.0, seeds=1, loads=(0.95,), systems=(E_PD,), warm=8)


@dataclass(frozen=True, slots=True)
class Case:
    system: str
    load: float
    order: str
    seed: int


@dataclass(slots=True)
class Served:
    at_s: float
    images: int
    ttft_s: float = 0.0
    ended_s: float = 0.0


@dataclass(slots=True)
class Cores:
    """Two cores that both stages share, or one for each. A pass keeps the speed with which it begins."""

    shared: bool
    _busy_until_s: dict[Stage, float] = field(default_factory=dict)

    def spend(self, stage: Stage, cost_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        others = [until_s for other, until_s in self._busy_until_s.items() if other is not stage]
        if self.shared and all(until_s <= now_s for until_s in others):
            cost_s *= _TWO_CORES
        self._busy_until_s[stage] = now_s + cost_s
        spend(cost_s)


def engines(cores: Cores) -> Engines:
    family = FakeFamily(patch_px=_PATCH_PX, max_tokens_per_item=_CONTEXT, context_length=_CONTEXT)
    model = replace(FAKE_MODEL, context_length=_CONTEXT)
    encoder = synthetic_encoder_profile(pass_s=0.0, token_s=_IMAGE_S / _IMAGE_TOKENS, load_s=0.0)
    decoder = synthetic_decoder_profile(step_s=_STEP_S, sequence_s=0.001, prefill_token_s=_PROMPT_TOKEN_S, load_s=0.0)
    options = EngineOptions(token_budget=256)
    return Engines(
        lambda _: DelayEncoderEngine(
            model, family, Costs(encoder), sleep=lambda cost_s: cores.spend(Stage.ENCODE, cost_s)
        ),
        lambda _: DelayTextEngine(
            model, family, Costs(decoder), options, sleep=lambda cost_s: cores.spend(Stage.PREFILL, cost_s)
        ),
        family=family,
        encoder_profile=encoder,
        decoder_profile=decoder,
    )


def objective_s(images: int) -> float:
    return _SLO_FACTOR * (_TEXT_S + _TWO_CORES * images * (_IMAGE_S + _PROMPT_TOKEN_S * _IMAGE_TOKENS))


def planned(load: float, settings: Settings, seed: int) -> list[Served]:
    """All requests, with those that do not count first. Times count from the first of all."""
    rng = random.Random(seed)
    at_s, found = 0.0, list[Served]()
    while len(found) < settings.warm:
        at_s += rng.expovariate(_WARM_LOAD * CAPACITY_PER_S)
        found.append(_drawn(at_s, rng))
    end_s = at_s + _IDLE_S + settings.seconds
    at_s += _IDLE_S
    while (at_s := at_s + rng.expovariate(load * CAPACITY_PER_S)) < end_s:
        found.append(_drawn(at_s, rng))
    return found


def _drawn(at_s: float, rng: random.Random) -> Served:
    return Served(at_s, 0 if rng.random() < TEXT_SHARE else rng.randint(1, MOST_IMAGES))


def request(number: int, images: int) -> ChatRequest:
    parts: list[Part] = [
        MediaPart(Modality.IMAGE, png_outline(IMAGE_PX, IMAGE_PX, b"%d/%d" % (number, at))) for at in range(images)
    ]
    text = TextPart(" ".join(f"w{WORDS[(number + at) % len(WORDS)]}" for at in range(TEXT_TOKENS)))
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return ChatRequest(f"r{number}", FAKE_MODEL.model_id, (Message("user", (*parts, text)),), sampling, _TIMEOUT_S)


def run(case: Case, settings: Settings) -> list[Served]:
    """What counts of one run. Raises AssertionError if anything is still held afterwards."""
    with patch.dict(ORDERINGS, {"patient": patient}):
        return _run(case, settings)


def _run(case: Case, settings: Settings) -> list[Served]:
    world = World(
        seed=case.seed,
        encoders=1,
        encoder_arena_bytes=32 * MIB,
        text_arena_bytes=32 * MIB,
        engines=engines(Cores(case.system == EPD)),
        router={"policies": PolicyNames(ordering=case.order), "windows": WindowLimits(isolated_samples=10)},
        encoder={"batches": BatchLimits(max_batch_tokens=_IMAGE_TOKENS)},
        text={"stream_interval_s": 1.0},
    )
    served = planned(case.load, settings, case.seed)

    async def main() -> None:
        async with running(world) as cluster:
            began_s = cluster.clock()
            async with asyncio.TaskGroup() as group:
                for number, asked in enumerate(served):
                    group.create_task(_client(cluster, number, asked, began_s))
            await cluster.check_nothing_is_held()

    virtual_time.run(main(), seed=case.seed, limit_s=7200)
    return served[settings.warm :]


async def _client(cluster: SimCluster, number: int, served: Served, began_s: float) -> None:
    sent_s = began_s + served.at_s
    await asyncio.sleep(sent_s - cluster.clock())
    async with aclosing(cluster.router.chat(request(number, served.images))) as stream:
        async for events in stream:
            if not served.ttft_s and any(isinstance(event, TokenChunk) for event in events):
                served.ttft_s = cluster.clock() - sent_s
    served.ended_s = cluster.clock() - began_s


@dataclass(frozen=True, slots=True)
class Row:
    """Times in seconds."""

    system: str
    load: float
    order: str
    images: int
    text_ttft_s: Mapping[str, float]
    image_ttft_s: Mapping[str, float]
    attained_text: float
    attained_images: float
    goodput_per_s: float


def row(case: Case, runs: Sequence[Sequence[Served]]) -> Row:
    """Of all seeds together."""
    everyone = [request for served in runs for request in served]
    text = [request for request in everyone if not request.images]
    images = [request for request in everyone if request.images]
    took_s = sum(max(request.ended_s for request in served) - served[0].at_s for served in runs)

    def ttft(served: Sequence[Served]) -> dict[str, float]:
        return {f"p{q}": round(percentile([request.ttft_s for request in served], q), 3) for q in (50, 90, 99)}

    def met(served: Sequence[Served]) -> int:
        return sum(request.ttft_s <= objective_s(request.images) for request in served)

    return Row(
        case.system,
        case.load,
        case.order,
        len(images),
        ttft(text),
        ttft(images),
        round(met(text) / len(text), 4),
        round(met(images) / len(images), 4),
        round(met(everyone) / took_s, 4),
    )


def measure(settings: Settings, jobs: int) -> dict[str, Any]:
    rows: list[Row] = []
    cases = list(product(settings.systems, settings.loads, settings.orders))
    seeded_cases = [Case(*case, seed) for case in cases for seed in range(settings.seeds)]
    with ProcessPoolExecutor(jobs) as pool:
        results = pool.map(run, seeded_cases, [settings] * len(seeded_cases))
        for case in cases:
            rows.append(row(Case(*case, 0), [next(results) for _ in range(settings.seeds)]))
            _show(rows[-1])
    return {"machine": machine.describe(), "settings": asdict(settings), "rows": [asdict(row) for row in rows]}


def _show(row: Row) -> None:
    def times(ttft: Mapping[str, float]) -> str:
        return " ".join(f"{name} {value:6.2f}" for name, value in ttft.items())

    print(
        f"{row.system:>5} {row.load:4.0%} {row.order:>10}: text {times(row.text_ttft_s)}; {row.images} with images {times(row.image_ttft_s)}; "
        f"attained {row.attained_text:.3f} and {row.attained_images:.3f}, goodput {row.goodput_per_s:.3f}/s",
        flush=True,
    )


def main() -> None:
    ending.by_sigterm()
    usual = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few requests, one load: shows that it works")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="for which requests come, of each run")
    parser.add_argument("--seeds", type=int, default=usual.seeds, help="runs of each order at each load")
    parser.add_argument("--loads", type=float, nargs="+", default=usual.loads, help="shares of the capacity")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    given = parser.parse_args()
    settings = Settings(given.seconds, given.seeds, tuple(given.loads), tuple(given.systems), tuple(given.orders))
    write_figures(given.json, measure(QUICK if given.quick else settings, given.jobs))


if __name__ == "__main__":
    main()
