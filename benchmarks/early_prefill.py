"""When sending the prefix of a prompt early pays (policy ``dispatch``), in virtual time.

The real services of a simulated cluster (``tests.simulation``) over engines that sleep as the ``decoder-only`` model of
``benchmarks.routing_models`` would take, with a prefix cache: requests of some images of 256 tokens with a text before or after them
arrive at random. ``complete`` sends a request once all of its images are encoded; with ``prefix`` the text instance computes what
comes before the first missing image meanwhile.

Rows are for images per request, where the text is, the number of encoders beside two text instances, and a load: the share of what
the busier of the two pools can do. ``early`` is the share of requests of which something was sent early. Equal seeds give equal
results, on any machine. What the router spends more is not in them: a call for each beginning, and one for each item sent with it.
"""

import argparse
import random
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from benchmarks.routing_models import MODELS, Model
from tests.simulation.cluster import MIB, Engines, World, running
from tests.simulation.workload import Ask, play
from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, TextPart
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.timeline import Timeline
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.delay import DelayEncoderEngine, DelayTextEngine
from triptych.policy.costs import Costs
from triptych.policy.policies import DISPATCHES, PolicyNames
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.media import png_outline
from triptych.testing.model import WORDS
from triptych.virtual import virtual_time
from triptych.virtual.offload import spend
from triptych.workload.report import percentile

_MODEL: Model = MODELS["decoder-only"]
_SIDE_PX, _IMAGE_TOKENS = 448, 256
_TEXT_TOKENS = 1000
_ANSWER_TOKENS = 16
_TEXTS = 2
_PREFIX_TOKENS = 1 << 18
"""Of the prefix cache of a text instance."""


@dataclass(frozen=True, slots=True)
class Settings:
    requests: int = 300
    images: tuple[int, ...] = (1, 4, 8)
    places: tuple[str, ...] = ("before", "after")
    """Of the text."""
    encoders: tuple[int, ...] = (2, 6)
    loads: tuple[float, ...] = (0.2, 0.5, 0.8)
    seed: int = 5


QUICK = Settings(requests=40, images=(4,), places=("after",), encoders=(2,), loads=(0.5,))


@dataclass(frozen=True, slots=True)
class Shape:
    images: int
    text: str
    encoders: int
    load: float


@dataclass(frozen=True, slots=True)
class Row:
    """Times in milliseconds."""

    shape: Shape
    dispatch: str
    ttft_mean_ms: float
    ttft_p99_ms: float
    early: float


def engines() -> Engines:
    encoder, decoder = _MODEL.profiles
    served = replace(FAKE_MODEL, context_length=_MODEL.family.context_length)

    def text(_: str) -> DelayTextEngine:
        options = EngineOptions(max_sequences=64)
        return DelayTextEngine(
            served, _MODEL.family, Costs(decoder), options, prefix_tokens=_PREFIX_TOKENS, sleep=spend
        )

    def image(_: str) -> DelayEncoderEngine:
        return DelayEncoderEngine(served, _MODEL.family, Costs(encoder), sleep=spend)

    return Engines(
        image, text, family=_MODEL.family, encoder_profile=encoder, decoder_profile=decoder, prepare_workers=8
    )


def rate_per_s(shape: Shape) -> float:
    """At which the busier pool has this share of work, by what requests take alone."""
    encoder, decoder = map(Costs, _MODEL.profiles)
    prompt = shape.images * _IMAGE_TOKENS + _TEXT_TOKENS
    text_s = decoder.prefill_s(prompt, 0).value + _ANSWER_TOKENS * decoder.decode_s(8, prompt).value / 8
    encode_s = shape.images * encoder.encode_s(_IMAGE_TOKENS, 1).value
    return shape.load / max(text_s / _TEXTS, encode_s / shape.encoders)


def asks(shape: Shape, settings: Settings) -> list[Ask]:
    rng, at_s, found = random.Random(f"{settings.seed}/{shape}"), 0.0, list[Ask]()
    for number in range(settings.requests):
        at_s += rng.expovariate(rate_per_s(shape))
        images: list[Part] = [
            MediaPart(Modality.IMAGE, png_outline(_SIDE_PX, _SIDE_PX, b"%d/%d" % (number, at)))
            for at in range(shape.images)
        ]
        words = rng.choices(WORDS, k=_TEXT_TOKENS)
        text = TextPart(" ".join(f"w{word}" for word in words))
        parts = (text, *images) if shape.text == "before" else (*images, text)
        sampling = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, seed=number)
        request = ChatRequest(f"r{number}", FAKE_MODEL.model_id, (Message("user", parts),), sampling, timeout_s=600.0)
        found.append(Ask(at_s, request))
    return found


def run(shape: Shape, dispatch: str, settings: Settings) -> Row:
    """One row. Raises AssertionError if a request fails or anything is still held afterwards."""
    world = World(
        seed=settings.seed,
        encoders=shape.encoders,
        texts=_TEXTS,
        encoder_arena_bytes=32 * MIB,
        text_arena_bytes=32 * MIB,
        engines=engines(),
        profiled=True,
        router={"policies": PolicyNames(dispatch=dispatch), "history_requests": settings.requests},
    )
    asked = asks(shape, settings)
    lines = virtual_time.run(_timelines(world, asked), seed=settings.seed, limit_s=7200)
    times = [1000 * line.ttft_s for line in lines]
    return Row(shape, dispatch, mean(times), percentile(times, 99), mean(line.early_tokens > 0 for line in lines))


async def _timelines(world: World, asked: list[Ask]) -> list[Timeline]:
    async with running(world) as cluster:
        for reply in await play(cluster.router, asked):
            assert reply.error is None, reply.error
        lines = [await cluster.router.timeline(ask.request.request_id) for ask in asked]
        await cluster.check_nothing_is_held()
    return lines


def measure(settings: Settings) -> dict[str, Any]:
    rows: list[Row] = []
    for images in settings.images:
        for text in settings.places:
            for encoders in settings.encoders:
                for load in settings.loads:
                    shape = Shape(images, text, encoders, load)
                    both = [run(shape, dispatch, settings) for dispatch in DISPATCHES]
                    _show(*both)
                    rows += both
    return {"machine": machine.describe(), "settings": asdict(settings), "rows": [asdict(row) for row in rows]}


def _show(complete: Row, prefix: Row) -> None:
    shape = complete.shape
    print(
        f"{shape.images} images, text {shape.text:<6} {shape.encoders} encoders  load {shape.load:3.0%}  "
        f"TTFT {complete.ttft_mean_ms:6.0f} -> {prefix.ttft_mean_ms:6.0f} ms mean ({_change(complete.ttft_mean_ms, prefix.ttft_mean_ms)})  "
        f"{complete.ttft_p99_ms:6.0f} -> {prefix.ttft_p99_ms:6.0f} p99 ({_change(complete.ttft_p99_ms, prefix.ttft_p99_ms)})  "
        f"early {prefix.early:4.0%}",
        flush=True,
    )


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="few requests, one shape: shows that it works")
    arguments = parser.parse_args()
    write_figures(arguments.json, measure(QUICK if arguments.quick else Settings()))


if __name__ == "__main__":
    ending.by_sigterm()
    main()
