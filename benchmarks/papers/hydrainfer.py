"""HydraInfer: operations of a layer (table 2), for LLaVA-1.5-7B and, with fewer key heads, Qwen2-7B; and of CLIP's layers."""

from collections.abc import Iterator
from typing import Any

from benchmarks.papers.rows import Row
from triptych.domain.architecture import Layers, linear
from triptych.families.defaults import TEXT_DEFAULTS
from triptych.families.language_models import language_model

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
    for name, each, hidden in (("LLaVA", layer("llama"), 4096), ("Qwen2", layer("qwen2", **_QWEN), 3584)):
        yield Row(
            "2", f"{name}, prefill: products", 24 * _PROMPT * hidden**2, each.work(_PROMPT, 0).flops, "QKVO and FFN together",
            shapes,
        )  # fmt: skip
        yield Row(
            "2", f"{name}, prefill: attention", 4 * _PROMPT**2 * hidden, each.work(0, each.pairs(_PROMPT)).flops, "",
            "the table leaves out that a position attends to none after it: half of the pairs",
        )  # fmt: skip
        yield Row(
            "2", f"{name}, decode: QKVO and FFN", 8 * hidden + 16 * hidden**2, each.work(1, 0).flops, "",
            misprint if name == "LLaVA" else f"{misprint}; {shapes}",
        )  # fmt: skip
        yield Row("2", f"{name}, decode: attention", 4 * _PROMPT * hidden, each.work(0, _PROMPT).flops)
