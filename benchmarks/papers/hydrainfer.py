"""HydraInfer: operations of a layer (table 2), for LLaVA-1.5-7B and, with fewer key heads, Qwen2-7B; and of CLIP's layers."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.papers.rows import Row
from benchmarks.papers.simulation import cluster, costs, mix, plan, serve
from triptych.domain.architecture import Layers, linear
from triptych.domain.stage import INSTANCE_NAMES, ModelPart, Role
from triptych.families.defaults import TEXT_DEFAULTS
from triptych.families.language_models import language_model
from triptych.sim.machines.run import simulate as by_machines
from triptych.sim.scenario import Deployment
from triptych.workload.report import percentile
from triptych.workload.requests import Size

TITLE = "HydraInfer"
_PROMPT, _IMAGE = 1000, 577
_QWEN: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip


def layer(kind: str, **sizes: Any) -> Layers:
    text = {**TEXT_DEFAULTS[kind], **sizes, "model_type": kind, "num_hidden_layers": 1}
    return language_model(text, tied=False).layers[0]


def rows() -> Iterator[Row]:
    clip = Layers(1, linear(1024, 4 * 1024) + linear(1024, 4096) + linear(4096, 1024), 1024, 1024)
    products, attention = 24 * _IMAGE * 1024**2, 4 * _IMAGE**2 * 1024
    yield Row("2", "CLIP, encode: products", products, clip.work(_IMAGE, 0).flops, "QKVO and FFN together")
    yield Row("2", "CLIP, encode: attention", attention, clip.work(0, _IMAGE**2).flops)
    shapes = (
        "4 of 28 key heads, and a gated FFN of 5.3 times the width, where the table has one of 4 times without a gate"
    )
    misprint = "the table prints 8BH for QKVO, which is 8BH^2 as in the other stages"
    for name, decoder_layer, hidden in (("LLaVA", layer("llama"), 4096), ("Qwen2", layer("qwen2", **_QWEN), 3584)):
        yield Row(
            "2", f"{name}, prefill: products", 24 * _PROMPT * hidden**2, decoder_layer.work(_PROMPT, 0).flops, "QKVO and FFN together",
            shapes,
        )  # fmt: skip
        yield Row(
            "2", f"{name}, prefill: attention", 4 * _PROMPT**2 * hidden, decoder_layer.work(0, decoder_layer.pairs(_PROMPT)).flops, "",
            "the table leaves out that a position attends to none after it: half of the pairs",
        )  # fmt: skip
        yield Row(
            "2", f"{name}, decode: QKVO and FFN", 8 * hidden + 16 * hidden**2, decoder_layer.work(1, 0).flops, "",
            misprint if name == "LLaVA" else f"{misprint}; {shapes}",
        )  # fmt: skip
        yield Row("2", f"{name}, decode: attention", 4 * _PROMPT * hidden, decoder_layer.work(0, _PROMPT).flops)


# --- simulated --------------------------------------------------------------------------------------------------------

_CLIP: Mapping[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}  # fmt: skip
_VICUNA: Mapping[str, Any] = {"model_type": "llama", "max_position_embeddings": 4096}
LLAVA: Mapping[str, Any] = {
    "model_type": "llava",
    "image_token_index": 32000,
    "text_config": _VICUNA,
    "vision_config": _CLIP,
}
LLAVA_NEXT: Mapping[str, Any] = {
    "model_type": "llava_next",
    "image_token_index": 32000,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "text_config": _VICUNA,
    "vision_config": _CLIP,
}
DEVICE = "h100"
"""An H800 has its operations and memory; the catalogue has no H800."""
TEXTCAPS: Mapping[str, Any] = {"images": "1", "size": Size(1024, 768), "text_tokens": "30", "output_tokens": "64"}
ASSUMED = "an image of 1024 x 768, 30 tokens of text and answers of 64: the paper shows the lengths only in a figure"
TPOT_SLO_S = 0.08
WITHOUT_BUDGETS = 5.1
"""Goodput of eight general instances without budgets, requests/s."""
SWEEP_RATE, REQUESTS, SEED = 8.0, 120, 1


def hybrid(config: Mapping[str, Any], roles: str, *, budgeted: bool = True) -> Deployment:
    text = (
        ("--max-sequences=128", f"--tpot-slo-s={TPOT_SLO_S}")
        if budgeted
        else ("--max-sequences=128", "--token-budget=8192", "--encode-share=1")
    )
    return cluster(config, roles, DEVICE, router=("--ordering=first-come", "--sharding=never"), text=text)


def simulated() -> Iterator[Row]:
    yield from _general_instances()
    yield from _ratios()
    yield from _migrations()


def _general_instances() -> Iterator[Row]:
    """Ten in a hundred gaps between tokens may be longer than the objective, and each encode and prefill of another makes one."""
    tokens = 2928
    made = hybrid(LLAVA_NEXT, "EPD:8", budgeted=False)
    encode_s = costs(made, ModelPart.ENCODER).encode_s(tokens).value
    prefill_s = costs(made, ModelPart.DECODER).prefill_s(tokens + 30).value
    yield Row(
        "fig. 14", "goodput of eight general instances without budgets, requests/s", WITHOUT_BUDGETS, 8 * 0.1 / (encode_s + prefill_s),
        "a tenth of the time is taken by encodes and prefills of others: by formula, as records have no gaps",
        f"encoding is computed to take {1000 * encode_s:.0f} ms and prefill {1000 * prefill_s:.0f} ms; {WITHOUT_BUDGETS}/s needs "
        f"{1000 * 8 * 0.1 / WITHOUT_BUDGETS:.0f} ms together, in eager mode and with preparation",
    )  # fmt: skip


def _ratios() -> Iterator[Row]:
    requests = plan(mix(**TEXTCAPS), SWEEP_RATE, REQUESTS, SEED)
    runs = {count: serve(hybrid(LLAVA_NEXT, f"EP:{count},D:{8 - count}"), requests) for count in range(1, 8)}
    least, most = (choose(runs, key=lambda count: runs[count].tpot_s) for choose in (min, max))
    fewest = max(runs, key=lambda count: runs[count].ttft_s)
    yield Row("fig. 11", "EP instances, of 8, with the lowest TPOT", 1, least, ASSUMED)
    yield Row("fig. 11", "EP instances, of 8, with the highest TPOT", 7, most, ASSUMED)
    yield Row("fig. 11", "EP instances, of 8, with the highest TTFT", 1, fewest, ASSUMED)


def _migrations() -> Iterator[Row]:
    """One encoder, three prefill and four decode instances."""
    made = hybrid(LLAVA, "E:1,P:3,D:4")
    outcome = by_machines(made, plan(mix(**TEXTCAPS), SWEEP_RATE, REQUESTS, SEED), keeps_spans=True)
    embeddings_ms = [
        1000 * (span.end_s - span.start_s)
        for span in outcome.spans
        if span.work == "pull" and span.instance.startswith(INSTANCE_NAMES[Role.P])
    ]
    pulled_s = sum(use.busy_s.get("pull", 0.0) for use in outcome.instances)
    latency_s = sum(record.end_s for record in outcome.records)
    assumed = f"LLaVA-1.5 on 1E3P4D at {SWEEP_RATE:g} requests/s; {ASSUMED}"
    yield Row("fig. 13", "migrations, % of the latency", 1.0, 100 * pulled_s / latency_s, assumed, is_bound=True)
    yield Row(
        "5.5", "95th percentile of an image's migration, ms", 2.0, percentile(embeddings_ms, 95), assumed, is_bound=True
    )
