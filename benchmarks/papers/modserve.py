"""ModServe: tiles, tokens and encoders of an image of 896 x 896 pixels (table 1), from configurations alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.papers.epd_serve import CONFIGS
from benchmarks.papers.rows import Row
from benchmarks.papers.simulation import cluster, costs, goodput, mix, plan, serve
from triptych.domain.embedding import DType, embedding_tokens
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.stage import ModelPart
from triptych.families.architecture import Architecture
from triptych.families.model_files import ModelFiles
from triptych.sim.scenario import Deployment
from triptych.workload.requests import Mix, Planned, Size

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


def rows() -> Iterator[Row]:
    for name, (config, tokens, millions) in MODELS.items():
        architecture = Architecture.load(ModelFiles(Path(), config, {}, {}, {}, {}, None))
        ours = embedding_tokens(architecture.family.outputs(IMAGE, DType.F16))
        encoder = architecture.encoder([], DType.F16)
        yield Row("1", f"{name}: tokens of an image", tokens, ours)
        yield Row(
            "1", f"{name}: millions of the encoder's parameters", millions, encoder.parameters / 1e6, "with the projector",
            PARAMETERS_DIFFER.get(name, ""),
        )  # fmt: skip


# --- simulated --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """What the paper says of a model."""

    throughput: float
    """Over the monolith's, on 128 GPUs."""
    steps: tuple[tuple[float, float], ...]
    """Changes of mean and P99 TTFT, %, by decoupling, by the order of requests and by routing."""


SIMULATED = {
    "Llama 3.2 Vision": Figures(3.3, ((-27, -42), (-12, -25), (-14, -32))),
    "InternVL-2.5 26B": Figures(5.5, ((-46, -47), (-12, -25), (-14, -32))),
}
GPUS, REQUESTS, SEED = 32, 800, 1
"""A fourth of the paper's cluster, in the same ratios: 8 monoliths, or 5 text instances and 12 image instances."""
MONOLITH, DECOUPLED = "EPD:8", "E:12,PD:5"
IMAGES = "0:0.5,1:0.3,2:0.08,4:0.06,8:0.04,16:0.02"
LOAD: Mapping[str, str] = {"text_tokens": "128", "output_tokens": "100"}
SIZE = Size(500, 500)
MEAN_IMAGES = 1.34
ASSUMED = "half of the requests have 1 to 16 images of 500 x 500, 1.3 a request; 128 tokens of text, answers of 100"
FACTORS = (10.0, 20.0)
"""Of objectives over the latency of a request that is alone at the monolith."""


def monolith(config: Mapping[str, Any], roles: str = MONOLITH) -> Deployment:
    return cluster(
        config,
        roles,
        "a100-80",
        preset="monolith",
        degree="4",
        text=("--encode-share=1", "--max-sequences=256"),
        cores=48,
    )


def decoupled(
    config: Mapping[str, Any], roles: str = DECOUPLED, *, routing: str = "least-loaded", ordering: str = "slo"
) -> Deployment:
    router = (f"--encoder-routing={routing}", f"--text-routing={routing}", f"--ordering={ordering}", "--sharding=never")
    return cluster(
        config,
        roles,
        "a100-80",
        degree="E=1,PD=4",
        router=router,
        text=("--max-sequences=256",),
        cores=12,
        over_network=True,
    )


def requests_of(images: str = IMAGES) -> Mix:
    return mix(images=images, size=SIZE, **LOAD)


def has_text_alone(planned: Planned) -> bool:
    return not planned.images


def has_images(planned: Planned) -> bool:
    return bool(planned.images)


class Tried:
    """A cluster at the rates that were tried: P99 of TTFT of both kinds of requests, as multiples of what they take alone."""

    def __init__(self, made: Deployment, load: Mix, alone: tuple[float, float]) -> None:
        self._made = made
        self._load = load
        self._alone = alone
        self._found: dict[float, float] = {}

    def at(self, rate: float) -> float:
        """The larger one of both multiples."""
        if rate not in self._found:
            served = serve(self._made, plan(self._load, rate, REQUESTS, SEED), warm_up=0.1)
            text, image = served.of(has_text_alone), served.of(has_images)
            self._found[rate] = max(text.ttft_at(99) / self._alone[0], image.ttft_at(99) / self._alone[1])
        return self._found[rate]

    def goodput(self, factor: float) -> float:
        return goodput(lambda rate: self.at(rate) <= factor, 8, 512)


def alone_s(made: Deployment) -> tuple[float, float]:
    """TTFT of a text request and of one with an image, with the cluster to itself."""
    ttfts_s = [serve(made, plan(requests_of(images), 0.05, 5, SEED)).ttft_s for images in ("0", "1")]
    return ttfts_s[0], ttfts_s[1]


def simulated() -> Iterator[Row]:
    for name, figures in SIMULATED.items():
        yield from _simulated(name, figures)


def _simulated(name: str, figures: Figures) -> Iterator[Row]:
    config = MODELS[name][0]
    whole, apart = monolith(config), decoupled(config)
    alone = alone_s(whole)
    tried = [Tried(made, requests_of(), alone) for made in (whole, apart)]
    bears = _capacities(whole, apart, MODELS[name][0])
    found: tuple[float, float] = 0.0, 0.0
    for factor in FACTORS:
        found = tried[0].goodput(factor), tried[1].goodput(factor)
        needed_ms = 1000 * GPUS / 4 * figures.throughput / found[1] / MEAN_IMAGES
        yield Row(
            "fig. 15", f"{name}: throughput over the monolith's, at {factor:g} times", figures.throughput, found[1] / found[0],
            f"P99 of TTFT within so many times that of a request alone; {ASSUMED}",
            f"{bears}; {figures.throughput} times needs monoliths that take {needed_ms:.0f} ms for each image",
        )  # fmt: skip
    rate = 0.8 * min(found)
    yield from _steps(name, figures, rate, bears)
    yield from _placements(name, whole, rate, bears)


def _capacities(whole: Deployment, apart: Deployment, config: Mapping[str, Any]) -> str:
    """What bounds both, in words."""
    image = MediaInfo(Modality.IMAGE, "png", SIZE.width, SIZE.height, 1, bytes(32))
    architecture = Architecture.load(ModelFiles(Path(), config, {}, {}, {}, {}, None))
    tokens = embedding_tokens(architecture.family.outputs(image, DType.F16))
    one, four = (costs(made, ModelPart.ENCODER).encode_s(tokens).value for made in (apart, whole))
    return (
        f"an image is computed to take {1000 * one:.0f} ms on one GPU and {1000 * four:.0f} on four, so 12 of 32 GPUs bear "
        f"{12 / one:.0f} images/s where eight monoliths that only encode would bear {8 / four:.0f}"
    )


def _steps(name: str, figures: Figures, rate: float, bears: str) -> Iterator[Row]:
    """Each change against the one before it."""
    config, requests = MODELS[name][0], plan(requests_of(), rate, REQUESTS, SEED)
    clusters = [
        monolith(config),
        decoupled(config, routing="round-robin", ordering="first-come"),
        decoupled(config, routing="round-robin"),
        decoupled(config),
    ]
    runs = [serve(made, requests, warm_up=0.1) for made in clusters]
    routed = 100 * (runs[3].ttft_s / runs[2].ttft_s - 1)
    for step, published, before, after in zip(
        ("decoupling", "order", "routing"), figures.steps, runs, runs[1:], strict=False
    ):
        text, image = (
            100 * (after.of(wanted).ttft_s / before.of(wanted).ttft_s - 1) for wanted in (has_text_alone, has_images)
        )
        kinds = f"the mean changes by {text:+.0f} % without images and {image:+.0f} % with them"
        reasons = {
            "decoupling": bears,
            "order": f"{kinds}; what waits is behind items at encoders that are filled unevenly, and routing changes the mean by {routed:+.0f} %",
            "routing": f"{kinds}: the gain over round-robin is that of the spread of images over requests, which is assumed",
        }
        for what, value, ours in (
            ("mean", published[0], after.ttft_s / before.ttft_s),
            ("P99", published[1], after.ttft_at(99) / before.ttft_at(99)),
        ):
            yield Row(
                "fig. 14", f"{name}: {step}, change of the {what} TTFT, %", value, 100 * (ours - 1),
                f"{rate:.0f} requests/s, 0.8 times what both bear; the paper averages over loads that it does not state",
                reasons[step],
            )  # fmt: skip


def _placements(name: str, whole: Deployment, rate: float, bears: str) -> Iterator[Row]:
    requests = plan(requests_of(), rate, REQUESTS, SEED)
    limit = serve(whole, requests, warm_up=0.1).ttft_at(99)
    wins = [
        texts
        for texts in range(2, 7)
        if serve(decoupled(MODELS[name][0], f"E:{GPUS - 4 * texts},PD:{texts}"), requests, warm_up=0.1).ttft_at(99)
        < limit
    ]
    yield Row(
        "fig. 18", f"{name}: most text instances with a lower P99 than the monolith's", 5, max(wins, default=0),
        f"on {GPUS} GPUs, half of the figure's; {rate:.0f} requests/s", f"{bears}: at a load that the monoliths bear, their latency of an image is the shorter one",
    )  # fmt: skip
