"""ModServe: sizes and latencies of stages, throughput over monoliths, order and routing, placements, and scaling over a day.

The monolith is simulated twice: as Triptych's, whose instances share the images of a request, and as vLLM 0.7.2, whose instances are on
their own.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf, pi, sin
from pathlib import Path
from typing import Any

from benchmarks.papers.engines import Model, Release, serve_apart
from benchmarks.papers.epd_serve import CONFIGS
from benchmarks.papers.preparation import process_s
from benchmarks.papers.rows import Row
from benchmarks.papers.simulation import (
    Goodput,
    Served,
    cluster,
    costs,
    goodput_by_line,
    mix,
    plan,
    serve,
    starting_in,
    with_preparation,
)
from triptych.domain.embedding import DType, embedding_tokens
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Role
from triptych.engine.delay import kv_memory
from triptych.families.architecture import Architecture
from triptych.families.model_files import ModelFiles
from triptych.policy.costs import Costs
from triptych.policy.roofline import Target, step_pass
from triptych.runtime.catalogue import load_catalogue
from triptych.sim.outcome import Outcome
from triptych.sim.run import simulate as by_services
from triptych.sim.scenario import Deployment
from triptych.workload.requests import Mix, Plan, Planned, Size, gamma_arrivals

TITLE = "ModServe"
IMAGE = MediaInfo(Modality.IMAGE, "png", 896, 896, 1, bytes(32))
_TEXT = {"llama": {"model_type": "llama"}, "qwen2": {"model_type": "qwen2", "hidden_size": 3584}}
MODELS: Mapping[str, tuple[Mapping[str, Any], int, float]] = {
    # configuration; published: tokens of the image, millions of parameters of the encoder
    "Llama 3.2 Vision": ({"model_type": "mllama", "text_config": {}, "vision_config": {"image_size": 560}}, 6404, 630),
    "LLaVA-OneVision": (
        {
            "model_type": "llava_onevision",
            "text_config": _TEXT["qwen2"],
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26,
                "num_attention_heads": 16, "image_size": 384, "patch_size": 14, "vision_use_head": False,
            },
        },
        7290,
        400,
    ),
    "InternVL-2.5 26B": (CONFIGS["InternVL2-26B"], 1280, 6000),
}  # fmt: skip
PARAMETERS_DIFFER = {
    "Llama 3.2 Vision": "630M are the 32 layers; 8 gated ones over all tiles and embeddings of tiles come on top",
}


@cache
def architecture_of(name: str) -> Architecture:
    return Architecture.load(ModelFiles(Path(), MODELS[name][0], {}, {}, {}, {}, None))


def rows() -> Iterator[Row]:
    for name, (_, tokens, millions) in MODELS.items():
        architecture = architecture_of(name)
        ours = embedding_tokens(architecture.family.outputs(IMAGE, DType.F16))
        encoder = architecture.encoder([], DType.F16)
        yield Row("1", f"{name}: tokens of an image", tokens, ours)
        yield Row(
            "1", f"{name}: millions of the encoder's parameters", millions, encoder.parameters / 1e6, "with the projector",
            PARAMETERS_DIFFER.get(name, ""),
        )  # fmt: skip
    yield from _stages()


def image_tokens(name: str) -> int:
    """Embedding tokens of an image of the workload."""
    image = MediaInfo(Modality.IMAGE, "png", SIZE.width, SIZE.height, 1, bytes(32))
    return embedding_tokens(architecture_of(name).family.outputs(image, DType.F16))


@cache
def parts(name: str, degree: int) -> tuple[Costs, Costs]:
    """Of encoder and decoder at so many A100 in tensor parallelism."""
    made = cluster(MODELS[name][0], "EPD:1", DEVICE, preset="monolith", degree=str(degree))
    return costs(made, ModelPart.ENCODER), costs(made, ModelPart.DECODER)


def _stages() -> Iterator[Row]:
    """Section 3.1."""
    llama, onevision, internvl = MODELS
    tokens = {name: image_tokens(name) for name in MODELS}
    image_s = {
        name: {degree: parts(name, degree)[0].encode_s(tokens[name]).value for degree in (1, 2, 4, 8)}
        for name in (llama, internvl)
    }
    rest = "without preprocessing, an image of 500 x 500 and 128 tokens of text"
    for name, degree, share in ((llama, 4, 79), (internvl, 8, 25)):
        prefill_s = parts(name, degree)[1].prefill_s(PROMPT_TOKENS + positions(name)).value
        encode_s = image_s[name][degree]
        yield Row(
            "fig. 5", f"{name}: encoding, % of the TTFT on {degree} GPUs", share, 100 * encode_s / (encode_s + prefill_s), rest,
            f"{1000 * encode_s:.0f} ms are computed to encode and {1000 * prefill_s:.0f} ms to prefill; the paper's images differ in size, of which it "
            "gives the distribution in a figure alone",
        )  # fmt: skip
    one_s = parts(onevision, 4)[0].encode_s(tokens[onevision]).value
    yield Row(
        "fig. 5", "encoding by InternVL's encoder (8 GPUs) over LLaVA-OneVision's (4 GPUs)", 10, image_s[internvl][8] / one_s, rest,
        f"of this image InternVL encodes one tile by 6B parameters and LLaVA-OneVision {tokens[onevision] // 729} by 0.4B; the paper gives no sizes of images",
    )  # fmt: skip
    yield Row(
        "fig. 9", f"{internvl}: latency of encoding on 4 GPUs over that on 8", 1.3, image_s[internvl][4] / image_s[internvl][8],
        "NVLM-D's encoder is the same", "85 % of linear speed is kept from 1 to 8 GPUs by the catalogue, beside the all-reduces; at 1.3 it is 65 % from 4 to 8",
    )  # fmt: skip
    fastest = min(image_s[llama], key=lambda degree: image_s[llama][degree])
    yield Row(
        "fig. 9", f"{llama}: GPUs with the lowest latency of encoding", 4, fastest, "of 1, 2, 4 and 8",
        "the catalogue has the same efficiency for parts of any size, and 10 us for an all-reduce",
    )  # fmt: skip
    decode_s = {degree: parts(llama, degree)[1].decode_s(1, 1024).value for degree in (1, 2, 4, 8)}
    yield Row(
        "fig. 9", f"{llama}: GPUs with the lowest TBT", 1, min(decode_s, key=lambda degree: decode_s[degree]), "of 1, 2, 4 and 8",
        "a step reads 16 GB of weights: 12 ms on one GPU at the catalogue's 67 % of its bandwidth, and 3 on four; the published engine gains nothing by that",
    )  # fmt: skip
    for name in (llama, internvl):
        batch = parts(name, 4)[0].encode_s(tokens[name], 8).value / image_s[name][4]
        yield Row(
            "fig. 6", f"{name}: latency of a batch of 8 images over that of one", 8, batch, '"linear latency scaling"; on four GPUs',
            "a pass has 3.7 ms and all-reduces of 10 us each that do not grow with the batch",
        )  # fmt: skip
    yield _mixed_modality(llama)


def _mixed_modality(name: str) -> Row:
    """16,000 tokens of context: text alone, and ten images of 1,601 tokens each."""
    target = Target(load_catalogue().device(DEVICE), DType.F16, 4)
    decoder, text, images = architecture_of(name).decoder, 16_000, 10
    text_s = target.pass_s(step_pass(decoder, DType.F16, new=text))
    states = images * 1601
    image_s = parts(name, 4)[0].encode_s(image_tokens(name)).value
    prefill_s = target.pass_s(step_pass(decoder, DType.F16, new=16, states=states, new_states=states))
    return Row(
        "fig. 12", f"{name}: TTFT of ten images over that of as many tokens of text", 1.5, (images * image_s + prefill_s) / text_s,
        "four GPUs; each image is computed in four tiles, as its encoder pads them",
        f"{1000 * image_s:.0f} ms are computed for an image and {1000 * prefill_s:.0f} for its states in the decoder, and {1000 * text_s:.0f} for the text. "
        f"An image in one tile, which has the stated 1,601 tokens, takes a fourth: {(images * image_s / 4 + prefill_s) / text_s:.2f}",
    )  # fmt: skip


# --- simulated --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """What the paper says of a model."""

    throughput: float
    """Over the monolith's, on 128 GPUs."""
    most_throughput: float
    """The same at the most relaxed objectives."""
    steps: tuple[tuple[float, float], ...]
    """Changes of mean and P99 TTFT, %, by decoupling, by the order of requests and by routing."""
    most_gain: float
    """Of P99 over the monolith's, where there are more than 2.4 image instances for each text instance."""
    fewer_gpus: float
    """Than the autoscaled monolith has, over a day, %."""


SIMULATED = {
    "Llama 3.2 Vision": Figures(3.3, 4.3, ((-27, -42), (-12, -25), (-14, -32)), 18.4, 41.3),
    "InternVL-2.5 26B": Figures(5.5, 6.8, ((-46, -47), (-12, -25), (-14, -32)), 9.2, 25),
}
PROCESSOR = {"Llama 3.2 Vision": "Llama 3.2 Vision", "InternVL-2.5 26B": "InternVL"}
"""Whose preprocessing was measured."""
DEVICE = "a100-80"
GPUS, REQUESTS, SEED = 32, 600, 1
"""A fourth of the paper's cluster, in the same ratios: 8 monoliths, or 5 text instances and 12 image instances."""
MONOLITHS, DECOUPLED = GPUS // 4, "E:12,PD:5"
IMAGES = {0: 0.5, 1: 0.3, 2: 0.08, 4: 0.06, 8: 0.04, 16: 0.02}
LOAD: Mapping[str, str] = {"text_tokens": "128", "output_tokens": "100"}
PROMPT_TOKENS = 140
SIZE = Size(500, 500)
MEAN_IMAGES = 1.34
ASSUMED = "half of the requests have 1 to 16 images of 500 x 500, 1.3 a request; 128 tokens of text, answers of 100"
FACTORS = (10.0, 20.0, 40.0)
"""Of objectives over the latency of a request that is alone at the monolith."""
RATES = tuple(4.0 * 1.4**step for step in range(12))
UNDIVIDED = "InternVL-2.5 26B"
"""The model whose encoder has 25 heads, which four GPUs cannot divide."""


def positions(name: str) -> int:
    """Of an image in a prompt: with cross-attention one."""
    return 1 if architecture_of(name).decoder.cross is not None else image_tokens(name)


def monolith(name: str) -> Deployment:
    made = cluster(
        MODELS[name][0],
        f"EPD:{MONOLITHS}",
        DEVICE,
        preset="monolith",
        degree="4",
        text=("--encode-share=1", "--max-sequences=256"),
        cores=48,
    )
    return with_preparation(made, process_s(PROCESSOR[name]))


def decoupled(name: str, roles: str = DECOUPLED, *, routing: str = "least-loaded", ordering: str = "slo") -> Deployment:
    router = (f"--encoder-routing={routing}", f"--text-routing={routing}", f"--ordering={ordering}", "--sharding=never")
    made = cluster(
        MODELS[name][0],
        roles,
        DEVICE,
        degree="E=1,PD=4",
        router=router,
        text=("--max-sequences=256",),
        cores=12,
        over_network=True,
    )
    return with_preparation(made, process_s(PROCESSOR[name]))


def release_of(name: str) -> Release:
    """V0 with its ``max_num_batched_tokens`` for models with images."""
    return Release(max(5120, architecture_of(name).decoder.context_length), chunked=False)


def engine_model(name: str, *, undivided: bool = False) -> Model:
    """An engine of vLLM on four GPUs. ``undivided``: each computes the whole attention of the encoder."""
    encoder, decoder = parts(name, 4)
    if undivided:
        encoder = _with_whole_attention(name, encoder)
    made = monolith(name)
    kv_tokens, _ = kv_memory(made.model, decoder, made.texts[Kind(Role.EPD)].engine)
    return Model(encoder, decoder, image_tokens(name), positions(name), kv_tokens)


def _with_whole_attention(name: str, divided: Costs) -> Costs:
    """In each layer four of twelve products are of attention."""
    image = MediaInfo(Modality.IMAGE, "png", SIZE.width, SIZE.height, 1, bytes(32))
    work = architecture_of(name).encoder([image], DType.F16).items[0].work
    share, whole = (work.products / 3 + work.attention) / work.flops, parts(name, 1)[0]
    rows = tuple(
        row._replace(seconds=share * whole.encode_s(row.item_tokens, row.items).value + (1 - share) * row.seconds)
        for row in divided.profile.encode
    )
    return Costs(replace(divided.profile, encode=rows))


Serve = Callable[[Plan], Served]


def monoliths(name: str) -> Mapping[str, tuple[Serve, str]]:
    """From ours to the release, each with one property more, and what that is."""
    release, model = release_of(name), engine_model(name)
    prepared = replace(release, in_step_s=process_s(PROCESSOR[name]))
    found: dict[str, tuple[Serve, str]] = {
        "a monolith whose instances share images": (partial(serve, monolith(name)), ""),
        "vLLM 0.7.2's monolith": (
            lambda requests: serve_apart(release, model, requests, MONOLITHS),
            "requests go whole to instances in turn; prompts with their images are computed whole and before answers (V0)",
        ),
        "vLLM 0.7.2's, with preprocessing in steps": (
            lambda requests: serve_apart(prepared, model, requests, MONOLITHS),
            f"V0 preprocesses images between steps, {1000 * prepared.in_step_s:.0f} ms each on one core by transformers with PIL",
        ),
    }
    if name == UNDIVIDED:
        whole = engine_model(name, undivided=True)
        found["vLLM 0.7.2's, with undivided attention as well"] = (
            lambda requests: serve_apart(prepared, whole, requests, MONOLITHS),
            "25 heads are not divided by four GPUs: each computes all of the encoder's attention (intern_vit.py)",
        )
    return found


def requests_of(images: Mapping[int, float] = IMAGES) -> Mix:
    weights = ",".join(f"{number}:{share:g}" for number, share in images.items())
    return mix(images=weights, size=SIZE, **LOAD)


def with_images_in(share: float) -> Mapping[int, float]:
    """The same numbers of images where this share of the requests has some."""
    some = 1 - IMAGES[0]
    return {number: weight * share / some if number else 1 - share for number, weight in IMAGES.items()}


def has_text_alone(planned: Planned) -> bool:
    return not planned.images


def has_images(planned: Planned) -> bool:
    return bool(planned.images)


def counted(served: Served) -> Served:
    """Without the first tenth, which meets an empty cluster."""
    ordered = sorted(served.records, key=lambda record: record.planned.arrival_s)
    return replace(served, records=ordered[len(ordered) // 10 :])


class Curve:
    """P99 of TTFT of both kinds of requests at rising rates, until objectives are missed by far."""

    def __init__(self, serves: Serve, missed: Callable[[float, float], bool]) -> None:
        self._found: list[tuple[float, float, float]] = []
        for rate in RATES:
            served = counted(serves(plan(requests_of(), rate, REQUESTS, SEED)))
            text, image = (served.of(wanted).ttft_at(99) for wanted in (has_text_alone, has_images))
            self._found.append((rate, text, image))
            if missed(text, image):
                break

    def held(self, factor: float, alone: tuple[float, float]) -> Goodput:
        """The rate up to which both are within so many times those of a request alone."""
        multiples = [(rate, max(text / alone[0], image / alone[1])) for rate, text, image in self._found]
        return goodput_by_line(multiples, factor)


def alone_s(serves: Serve) -> tuple[float, float]:
    """TTFT of a text request and of one with an image, with the cluster to itself."""
    ttfts_s = [serves(plan(requests_of({images: 1.0}), 0.05, 5, SEED)).ttft_s for images in (0, 1)]
    return ttfts_s[0], ttfts_s[1]


def simulated() -> Sequence[Callable[[], Iterable[Row]]]:
    return [partial(table, name) for table in (_day, _throughput, _placements, _steps) for name in SIMULATED]


def _throughput(name: str) -> Iterator[Row]:
    figures = SIMULATED[name]
    known = {system: (alone_s(serves), serves, of) for system, (serves, of) in monoliths(name).items()}
    slowest = [max(alone[kind] for alone, _, _ in known.values()) for kind in (0, 1)]

    def missed(text_s: float, image_s: float) -> bool:
        return text_s > FACTORS[-1] * slowest[0] or image_s > FACTORS[-1] * slowest[1]

    apart = Curve(partial(serve, decoupled(name)), missed)
    bears, cumulated = _capacities(name), ""
    for system, (alone, serves, of) in known.items():
        curve = Curve(serves, missed)
        cumulated = "; ".join(part for part in (cumulated, of) if part)
        for factor in FACTORS:
            held, own = apart.held(factor, alone), curve.held(factor, alone)
            ratio = held.over(own)
            published = figures.most_throughput if factor == FACTORS[-1] else figures.throughput
            reason = f"the monoliths bear {own} requests/s and the decoupled instances {held}; alone a request takes {1000 * alone[0]:.0f} ms, or {1000 * alone[1]:.0f} ms with an image; {bears}"
            yield Row(
                "fig. 17" if factor == FACTORS[-1] else "fig. 15", f"{name}: throughput over that of {system}, at {factor:g} times", published,
                ratio.figure, f"P99 of TTFT within so many times that of a request alone at the monolith; {'; '.join(part for part in (ASSUMED, cumulated) if part)}", reason,
                instead=ratio.instead,
            )  # fmt: skip


def _capacities(name: str) -> str:
    """What bounds both, in words."""
    one, four = (parts(name, degree)[0].encode_s(image_tokens(name)).value for degree in (1, 4))
    return (
        f"an image is computed to take {1000 * one:.0f} ms on one GPU and {1000 * four:.0f} on four, so 12 of 32 GPUs bear "
        f"{12 / one:.0f} images/s where eight monoliths that only encode would bear {8 / four:.0f}"
    )


def _rate(name: str) -> float:
    """Requests/s at which an image instance encodes for seven tenths of the time."""
    return 0.7 * 12 / parts(name, 1)[0].encode_s(image_tokens(name)).value / MEAN_IMAGES


def _steps(name: str) -> Iterator[Row]:
    """Each change against the one before it."""
    figures, rate, bears = SIMULATED[name], _rate(name), _capacities(name)
    requests = plan(requests_of(), rate, REQUESTS, SEED)
    clusters = [
        decoupled(name, routing="round-robin", ordering="first-come"),
        decoupled(name, routing="round-robin"),
        decoupled(name),
    ]
    runs = [counted(serve(made, requests)) for made in clusters]
    known, cumulated = monoliths(name), ""
    ours, *_, release = known
    assumed = f"{rate:.0f} requests/s, where image instances are busy for 70 %; the paper averages over loads that it does not state"
    for system, (serves, of) in known.items():
        cumulated = "; ".join(part for part in (cumulated, of) if part)
        if system in (ours, release):
            before = counted(serves(requests))
            for row in _changes(
                name,
                f"decoupling from {system if system == ours else 'the release'}",
                figures.steps[0],
                before,
                runs[0],
            ):
                yield replace(row, assumption=f"{assumed}; {cumulated}" if cumulated else assumed, differs=bears)
    routed = 100 * (runs[2].ttft_s / runs[1].ttft_s - 1)
    for step, published, (before, after) in (
        ("order", figures.steps[1], runs[:2]),
        ("routing", figures.steps[2], runs[1:]),
    ):
        text, image = (
            100 * (after.of(wanted).ttft_s / before.of(wanted).ttft_s - 1) for wanted in (has_text_alone, has_images)
        )
        kinds = f"the mean changes by {text:+.0f} % without images and {image:+.0f} % with them"
        reasons = {
            "order": f"{kinds}; what waits is behind items at encoders that are filled unevenly, and routing changes the mean by {routed:+.0f} %",
            "routing": f"{kinds}: the gain over round-robin is that of the spread of images over requests, which is assumed",
        }
        for row in _changes(name, step, published, before, after):
            yield replace(row, assumption=assumed, differs=reasons[step])


def _changes(name: str, step: str, published: tuple[float, float], before: Served, after: Served) -> Iterator[Row]:
    means, tails = after.ttft_s / before.ttft_s, after.ttft_at(99) / before.ttft_at(99)
    yield Row("fig. 14", f"{name}: {step}, change of the mean TTFT, %", published[0], 100 * (means - 1))
    yield Row("fig. 14", f"{name}: {step}, change of the P99 TTFT, %", published[1], 100 * (tails - 1))


def _placements(name: str) -> Iterator[Row]:
    """By text instances, and by the share of requests with images."""
    figures, rate, texts, shares = SIMULATED[name], _rate(name), range(2, 7), (0.1, 0.5, 0.9)
    release = list(monoliths(name).values())[-1][0]
    p99_s: dict[tuple[int, float], float] = {}
    whole_s: dict[float, float] = {}
    for share in shares:
        requests = plan(requests_of(with_images_in(share)), rate * 0.5 / share, REQUESTS, SEED)
        whole_s[share] = counted(release(requests)).ttft_at(99)
        for count in texts:
            made = decoupled(name, f"E:{GPUS - 4 * count},PD:{count}")
            p99_s[count, share] = counted(serve(made, requests)).ttft_at(99)
    assumed = f"on {GPUS} GPUs, half of the figure's, against vLLM 0.7.2's monoliths; {rate:.0f} requests/s, and as many with images where another share has some"
    wins = [count for count in texts if p99_s[count, 0.5] < whole_s[0.5]]
    found = ", ".join(f"{count} text instances {p99_s[count, 0.5]:.2f} s" for count in texts)
    yield Row(
        "fig. 18", f"{name}: most text instances with a lower P99 than the monolith's", 5, max(wins, default=0), assumed,
        f"monoliths {whole_s[0.5]:.2f} s, {found}",
    )  # fmt: skip
    gains = {at: whole_s[at[1]] / p99_s[at] for at in p99_s if (GPUS - 4 * at[0]) / at[0] > 2.4}
    best = max(gains, key=lambda at: gains[at])
    yield Row(
        "fig. 18", f"{name}: largest gain of P99 over the monolith's, with over 2.4 image instances for a text instance", figures.most_gain, gains[best], assumed,
        f"with {best[0]} text instances and {best[1]:.0%} of requests with images: {p99_s[best]:.2f} s against {whole_s[best[1]]:.2f}; the paper names neither load nor times",
    )  # fmt: skip
    yield Row(
        "fig. 18", f"{name}: placements and shares of image requests with a gain, % of those with over 2.4 image instances for a text instance", 100,
        100 * sum(gain > 1 for gain in gains.values()) / len(gains), assumed,
        "; ".join(f"{count} text instances, {share:.0%}: {gain:.1f}" for (count, share), gain in gains.items() if gain <= 1),
    )  # fmt: skip


# --- a day ------------------------------------------------------------------------------------------------------------

DAY_S, HOURS = 240.0, 24
"""A day takes this long."""
FIVE_MINUTES_S = 300 * DAY_S / 86400
"""Of it: between two decisions, and from an order to an instance that serves."""
MANAGER = (
    f"--period-s={FIVE_MINUTES_S:g}", f"--growth-cooldown-s={FIVE_MINUTES_S:g}", f"--settle-s={FIVE_MINUTES_S:g}", f"--recover-s={FIVE_MINUTES_S:g}",
    "--attainment-window-s=5", f"--max-changes-per-hour={30 * 86400 / DAY_S:.0f}",
)  # fmt: skip
"""Of the pool manager, whose times are compressed as well."""
TEXT_PER_S, IMAGE_PER_S, BURST = 3.0, 3.0, 6.0
"""Requests in the mean; those with images have ``BURST`` times as many in four of the hours."""
BURST_HOURS = range(12, 16)
DAY_FACTOR = 20.0


def day() -> Plan:
    """Requests of a day: text with a peak in the afternoon, images with a burst at noon."""
    arrival, drawn = random.Random(SEED), random.Random(SEED + 1)
    kinds = requests_of({0: 1.0}), requests_of(with_images_in(1.0))
    requests: list[Planned] = []
    hour_s = DAY_S / HOURS
    for hour in range(HOURS):
        rates = (
            TEXT_PER_S * (1 + 0.5 * sin(2 * pi * (hour - 9) / HOURS)),
            IMAGE_PER_S * (BURST if hour in BURST_HOURS else 1),
        )
        for kind, rate in zip(kinds, rates, strict=True):
            times = gamma_arrivals(1.0, 1 / rate, hour * hour_s, (hour + 1) * hour_s, arrival)
            requests += [replace(kind.request(at_s, drawn), output_tokens=10) for at_s in times]
    return Plan(sorted(requests, key=lambda request: request.arrival_s), DAY_S)


def _scaled(name: str, roles: str, *, whole: bool) -> Deployment:
    given = ("--encode-share=1", "--max-sequences=256") if whole else ("--max-sequences=256",)
    made = cluster(
        MODELS[name][0], roles, DEVICE, preset="monolith" if whole else None, degree="4" if whole else "E=1,PD=4",
        router=(f"--slo=ttft={DAY_FACTOR:g}x", "--sharding=never"), text=given, cores=48 if whole else 12, over_network=True,
        manager=MANAGER,
    )  # fmt: skip
    return starting_in(with_preparation(made, process_s(PROCESSOR[name])), FIVE_MINUTES_S)


def _day(name: str) -> Iterator[Row]:
    """Autoscaled, by the services."""
    requests, alone = day(), alone_s(partial(serve, monolith(name)))
    whole, apart = (
        by_services(made, requests, timeout_s=600)
        for made in (_scaled(name, "EPD:2", whole=True), _scaled(name, "E:4,PD:1", whole=False))
    )
    hours = [sum(outcome.device_hours().values()) for outcome in (whole, apart)]
    missed = [_missed(outcome, alone) for outcome in (whole, apart)]
    peaks = [_gpus(outcome) for outcome in (whole, apart)]
    yield Row(
        "fig. 16", f"{name}: fewer GPUs than the autoscaled monolith over a day, %", SIMULATED[name].fewer_gpus, 100 * (1 - hours[1] / hours[0]),
        f"a day in {DAY_S:g} s, of {TEXT_PER_S:g} text and {IMAGE_PER_S:g} image requests/s with {BURST:g} times as many of these for four hours; "
        "the trace is not published",
        f"{hours[0]:.2f} against {hours[1]:.2f} GPU-hours, at most {peaks[0]} against {peaks[1]} GPUs; {missed[0]:.1%} and {missed[1]:.1%} of the requests miss "
        f"{DAY_FACTOR:g} times their latency alone; {_capacities(name)}",
    )  # fmt: skip


def _missed(outcome: Outcome, alone: tuple[float, float]) -> float:
    late = [
        (record.ttft_s or inf) > DAY_FACTOR * alone[has_images(record.planned)] or not record.ok
        for record in outcome.records
    ]
    return sum(late) / len(late)


def _gpus(outcome: Outcome) -> int:
    """The most at one time."""
    events = sorted(
        event for use in outcome.instances for event in ((use.start_s, use.devices), (use.end_s, -use.devices))
    )
    most = at_once = 0
    for _, change in events:
        at_once += change
        most = max(most, at_once)
    return most
