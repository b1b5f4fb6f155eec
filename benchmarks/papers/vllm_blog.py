"""vLLM's post on encoder disaggregation: goodput and tails of one encoder and three text instances against four monoliths."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.papers.rows import Row
from benchmarks.papers.simulation import cluster, costs, goodput, mix, plan, serve
from triptych.domain.stage import ModelPart
from triptych.sim.scenario import Deployment
from triptych.workload.requests import Mix, Size

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
    (400, 4): (6, 12),
    (2000, 1): (8, 18),
    (2000, 4): (4, 8),
}
TTFT_SLO_S, TPOT_SLO_S = 20.0, 0.1
IMAGE_TOKENS = 400
REQUESTS, SEED = 1000, 1


def requests_of(text_tokens: int, images: int) -> Mix:
    return mix(images=str(images), size=Size(640, 640), text_tokens=str(text_tokens), output_tokens="150")


def monolith() -> Deployment:
    return cluster(
        CONFIG,
        "EPD:4",
        "a100-80",
        preset="monolith",
        text=("--encode-share=1", "--max-sequences=256", "--token-budget=8192"),
        cores=16,
    )


def apart() -> Deployment:
    return cluster(
        CONFIG, "E:1,PD:3", "a100-80", router=("--ordering=first-come", "--sharding=never"),
        text=("--max-sequences=256", "--token-budget=8192"), cores=16,
    )  # fmt: skip


def held(made: Deployment, load: Mix) -> float:
    def good(rate: float) -> bool:
        served = serve(made, plan(load, rate, REQUESTS, SEED))
        return served.ttft_at(99) <= TTFT_SLO_S and served.tpot_at(99) <= TPOT_SLO_S

    return goodput(good, 8, 64, precision=0.08)


def rows() -> Iterator[Row]:
    """None needs only formulas."""
    return iter(())


def simulated() -> Iterator[Row]:
    clusters = {"4 monoliths": monolith(), "1 encoder and 3 text instances": apart()}
    whole = clusters["4 monoliths"]
    encoder, decoder = (costs(whole, part) for part in (ModelPart.ENCODER, ModelPart.DECODER))
    for (text_tokens, images), published in GOODPUT.items():
        load = requests_of(text_tokens, images)
        ours = [held(made, load) for made in clusters.values()]
        prompt = text_tokens + images * IMAGE_TOKENS
        request = f"{images} images" if images > 1 else "1 image"
        encode_s, prefill_s = encoder.encode_s(IMAGE_TOKENS).value, decoder.prefill_s(prompt).value
        step_s = decoder.decode_s(32, prompt).value
        monolith_per_s = published[0] / 4
        left = 1 - monolith_per_s * (images * encode_s + prefill_s)
        differs = (
            f"at the published {published[0]} requests/s a monolith is computed to encode and prefill for {1 - left:.0%} of its time, so that steps of "
            f"{1000 * step_s:.0f} ms (32 sequences) make a TPOT of {1000 * step_s / left:.0f} ms, not 100: what bounds it is not in the model"
        )
        what = f"{text_tokens} tokens of text, {request}"
        assumed = f"{REQUESTS} requests, costs from the configuration alone on A100"
        yield Row(
            "goodput",
            f"{what}: encoder apart over monoliths",
            published[1] / published[0],
            ours[1] / ours[0],
            assumed,
            differs,
        )
        bears = f"an image is computed to take {1000 * encode_s:.1f} ms, so one encoder bears {1 / encode_s / images:.1f} requests/s, and the prompt {1000 * prefill_s:.0f} ms"
        for system, value, own, reason in zip(clusters, published, ours, (differs, bears), strict=True):
            yield Row("goodput", f"{what}: {system}, requests/s", value, own, assumed, reason)
