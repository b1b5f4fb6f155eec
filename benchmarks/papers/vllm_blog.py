"""vLLM's post on encoder disaggregation: goodput and tails of one encoder and three text instances against four monoliths.

The monoliths are simulated twice: as Triptych's, and as engines of the release that the post is of (0.11.1), which ran in lock step.
Images are preprocessed by one process of each server, as in the release: at the engines in lock step by one ahead of all four.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from benchmarks.papers.engines import Model, Release, serve_in_step
from benchmarks.papers.preparation import process_s
from benchmarks.papers.rows import Row
from benchmarks.papers.simulation import Goodput, Served, cluster, costs, goodput, mix, plan, serve, with_preparation
from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Role
from triptych.engine.delay import kv_memory
from triptych.sim.scenario import Deployment
from triptych.workload.requests import Mix, Plan, Size

TITLE = "vLLM's encoder disaggregation"
CONFIG: Mapping[str, Any] = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}  # fmt: skip
"""Qwen3-VL-4B."""
GOODPUT = {
    # by tokens of text and images of a request: goodput of four monoliths, and of one encoder beside three text instances
    (400, 1): (23, 24),
    (400, 4): (6, 12),
    (2000, 1): (8, 18),
    (2000, 3): (4, 9),
    (2000, 4): (4, 8),
}
TAILS = {400: ((20, 50), (20, 50)), 2000: ((30, 50), (20, 40))}
"""By tokens of text: reductions of P99 TTFT and TPOT, %, from and to."""
TTFT_SLO_S, TPOT_SLO_S = 20.0, 0.1
IMAGE_TOKENS, ENGINES, BUDGET = 400, 4, 2048
"""``BUDGET``: tokens of a step, vLLM's default for its server on an A100."""
REQUESTS, SEED = 400, 1
PROCESSOR = "Qwen3-VL"
"""Whose preprocessing was measured."""
HIGHEST = 24
"""Requests/s: the post's rates go from 4 to 24."""
_TEXT = ("--max-sequences=256", f"--token-budget={BUDGET}")


def requests_of(text_tokens: int, images: int) -> Mix:
    return mix(images=str(images), size=Size(640, 640), text_tokens=str(text_tokens), output_tokens="150")


@cache
def monolith() -> Deployment:
    made = cluster(CONFIG, f"EPD:{ENGINES}", "a100-80", preset="monolith", text=("--encode-share=1", *_TEXT), cores=1)
    return with_preparation(made, process_s(PROCESSOR))


@cache
def apart() -> Deployment:
    router = ("--ordering=first-come", "--sharding=never")
    return with_preparation(
        cluster(CONFIG, "E:1,PD:3", "a100-80", router=router, text=_TEXT, cores=1), process_s(PROCESSOR)
    )


@cache
def model() -> Model:
    """At one of the engines."""
    made = monolith()
    encoder, decoder = costs(made, ModelPart.ENCODER), costs(made, ModelPart.DECODER)
    kv_tokens, _ = kv_memory(made.model, decoder, made.texts[Kind(Role.EPD)].engine)
    return Model(encoder, decoder, IMAGE_TOKENS, IMAGE_TOKENS, kv_tokens)


def held(serves: Callable[[Plan], Served], load: Mix) -> Goodput:
    def good(rate: float) -> bool:
        served = serves(plan(load, rate, REQUESTS, SEED))
        return served.ttft_at(99) <= TTFT_SLO_S and served.tpot_at(99) <= TPOT_SLO_S

    return goodput(good, 2, HIGHEST, precision=0.08)


def rows() -> Iterator[Row]:
    """None needs only formulas."""
    return iter(())


def simulated() -> Sequence[Callable[[], Iterable[Row]]]:
    return [partial(_load, *load) for load in GOODPUT]


def _load(text_tokens: int, images: int) -> Iterator[Row]:
    published, published_apart = GOODPUT[text_tokens, images]
    release = Release(BUDGET, chunked=True, ahead_s=process_s(PROCESSOR))

    def monoliths(requests: Plan) -> Served:
        return serve(monolith(), requests)

    def parts(requests: Plan) -> Served:
        return serve(apart(), requests)

    def engines(requests: Plan) -> Served:
        return serve_in_step(release, model(), requests, ENGINES)

    encode_s = model().encode_s(1)
    load = requests_of(text_tokens, images)
    ours_apart, ours, stepping = (held(system, load) for system in (parts, monoliths, engines))
    prompt = text_tokens + images * IMAGE_TOKENS
    prefill_s = model().decoder.prefill_s(prompt).value
    request_s = images * encode_s + prefill_s
    what = f"{text_tokens} tokens of text, {images} images" if images > 1 else f"{text_tokens} tokens of text, 1 image"
    assumed = (
        f"{REQUESTS} requests, costs from the configuration alone on A100, {BUDGET} tokens in a step; one process of each server that encodes preprocesses its images, "
        f"{1000 * release.ahead_s:.0f} ms each by transformers with PIL, which bears {1 / release.ahead_s:.0f} images/s"
    )
    stepped = (
        f"{assumed}; 0.11.1 lets its data-parallel engines step together, so that each waits for the longest step (pull request 30739), and has one such "
        "process for all of them"
    )
    enough = ", ".join(
        f"{1 / (1 / rate + TTFT_SLO_S / REQUESTS):.2g}/s of {rate}/s" for rate in (HIGHEST // 2, HIGHEST)
    )
    judged = (
        f"TPOT alone decides: {REQUESTS} requests have first tokens within {TTFT_SLO_S:g} s where {enough} are borne"
    )
    alone = (
        f"engines that do not wait for each other are busy with prompts for {published / ENGINES * request_s:.0%} of the time at the published "
        f"{published} requests/s, and all of them for {published * request_s:.0%} in lock step"
    )
    together = (
        f"at the published {published} requests/s, encodes and prompts of {1000 * request_s:.0f} ms take {published * request_s:.0%} of a time that "
        f"the engines share, but for those that two have in one step"
    )
    bears = (
        f"an image is computed to take {1000 * encode_s:.1f} ms, so one encoder bears {1 / encode_s / images:.0f} requests/s, and the prompt "
        f"{1000 * prefill_s:.0f} ms, so three text instances bear {3 / prefill_s:.0f}"
    )
    for system, value, own, assumption, reason in (
        ("4 monoliths that do not wait for each other", published, ours, assumed, alone),
        ("4 engines in lock step", published, stepping, stepped, together),
        ("1 encoder and 3 text instances", published_apart, ours_apart, assumed, bears),
    ):  # fmt: skip
        yield Row(
            "goodput", f"{what}: {system}, requests/s", value, own.figure, f"{assumption}; {judged}", reason, instead=own.instead
        )  # fmt: skip
    ratio = published_apart / published
    for over, own, assumption, reason in (
        ("monoliths that do not wait for each other", ours, assumed, alone),
        ("engines in lock step", stepping, stepped, f"{together}; {bears}"),
    ):
        gain = ours_apart.over(own)
        yield Row(
            "goodput", f"{what}: encoder apart over {over}", ratio, gain.figure, f"{assumption}; {judged}", reason, instead=gain.instead
        )  # fmt: skip
    below = plan(load, 0.75 * stepping.least, REQUESTS, SEED)
    bears_most = (
        "the most tried, which engines in lock step bear" if stepping.instead else "what engines in lock step bear"
    )
    yield from _tails(
        what, text_tokens, engines(below), parts(below), f"at {below.rate:.1f} requests/s, three quarters of {bears_most}; {stepped}"
    )  # fmt: skip
    if stepping.figure is None:
        yield Row(
            "throughput", f"{what}: gain of tokens/s, %", 10, None, f"a fourth above what engines in lock step bear; {stepped}",
            "no rate was found that is above what engines in lock step bear", until=30, instead=f"the engines bear {stepping.instead}",
        )  # fmt: skip
        return
    more = plan(load, 1.25 * stepping.figure, REQUESTS, SEED)
    more_tokens = parts(more).tokens_per_s / engines(more).tokens_per_s
    yield Row(
        "throughput", f"{what}: gain of tokens/s, %", 10, 100 * (more_tokens - 1), f"at {more.rate:.1f} requests/s, a fourth above what engines in lock step bear; {stepped}",
        "tokens of answers over the time to the last of them: both systems make what is asked for, and engines in lock step end later by their longer answers alone", until=30,
    )  # fmt: skip


def _tails(what: str, text_tokens: int, engines: Served, parts: Served, assumed: str) -> Iterator[Row]:
    """At a rate that the engines bear."""
    reduced = (
        (100 * (1 - parts.ttft_at(99) / engines.ttft_at(99)), 1000 * parts.ttft_at(99), 1000 * engines.ttft_at(99)),
        (100 * (1 - parts.tpot_at(99) / engines.tpot_at(99)), 1000 * parts.tpot_at(99), 1000 * engines.tpot_at(99)),
    )
    for metric, (least, most), (ours, own_ms, other_ms) in zip(
        ("TTFT", "TPOT"), TAILS[text_tokens], reduced, strict=True
    ):
        yield Row(
            "tails", f"{what}: reduction of P99 {metric}, %", least, ours, assumed, f"{own_ms:.0f} ms against {other_ms:.0f}; the post names no rate", until=most,
        )  # fmt: skip
