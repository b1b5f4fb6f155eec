"""EPD-Serve: weights that stages do not hold (section 4.3), and what memory bears (tables 2, 3 and 8).

Memory per patch or image depends on engines that the paper does not describe. But it is one number for each model and
system: so one row of a table, or two where there is a constant part, give the others. Counts are rounded
down: the capacity is taken to be in the middle between that of the given count and of one more.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers.rows import Row
from triptych.domain.architecture import linear
from triptych.domain.embedding import DType
from triptych.families.architecture import Architecture
from triptych.families.model_files import ModelFiles

TITLE = "EPD-Serve"
_INTERNLM: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 92553,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
"""InternLM2 has the parameters of a Llama."""
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "MiniCPM-V 2.6": {
        "model_type": "llava",
        "image_token_index": 1,
        "vision_feature_select_strategy": "full",
        "text_config": {
            "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151666,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
            "num_attention_heads": 16, "image_size": 980, "patch_size": 14, "vision_use_head": False,
        },
    },
    "InternVL2-8B": {
        "model_type": "internvl",
        "tie_word_embeddings": False,
        "text_config": {**_INTERNLM, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "attention_bias": True},
    },
    "InternVL2-26B": {
        "model_type": "internvl",
        "tie_word_embeddings": False,
        "text_config": {**_INTERNLM, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 48},
        "vision_config": {
            "hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25,
            "use_qk_norm": True, "norm_type": "rms_norm",
        },
    },
}  # fmt: skip
SAVED = {"MiniCPM-V 2.6": (95, 5), "InternVL2-8B": (96.2, 3.7), "InternVL2-26B": (78.3, 21.6)}
"""Weights that encode and prefill instances do not hold, %."""
TABLE_3 = {
    # patches of an image, at each resolution: batches of ten images that fit encode and prefill instances
    "MiniCPM-V 2.6": {1: (49, 86), 3: (16, 29), 10: (4, 9)},
    "InternVL2-8B": {3: (67, 10), 13: (15, 2)},
    "InternVL2-26B": {3: (22, 4), 13: (6, 1)},
}
TABLE_2 = {
    # images that fit a request, at each number of patches: DistServe and EPD
    "MiniCPM-V 2.6": {1: (77, 490), 3: (26, 165), 10: (7, 49)},
    "InternVL2-26B": {3: (11, 45), 13: (1, 10)},
}
TABLE_8 = {
    # images in a request: memory left for keys and values, %, of DistServe and EPD. None: it does not fit
    "MiniCPM-V 2.6": {5: (86, 99), 10: (74, 97), 20: (49, 95), 40: (None, 92)},
    "InternVL2-26B": {5: (67, 89), 10: (36, 80), 20: (None, 63)},
}


def tower_share(name: str) -> float:
    """Share of the vision transformer in all parameters, without the projector."""
    config = CONFIGS[name]
    architecture = Architecture.load(ModelFiles(Path(), config, {}, {}, {}, {}, None))
    encoder, hidden = architecture.encoder([], DType.F16), architecture.family.hidden_size
    joined = encoder.hidden_size * (4 if config["model_type"] == "internvl" else 1)
    projector = linear(joined, hidden).stored + linear(hidden, hidden).stored
    projector += 2 * joined if config["model_type"] == "internvl" else 0
    return (encoder.parameters - projector) / (encoder.parameters + architecture.decoder.parameters)


def rows() -> Iterator[Row]:
    for name, (encode, prefill) in SAVED.items():
        share = 100 * tower_share(name)
        yield Row("4.3", f"{name}: encode instances save, %", encode, 100 - share, "the tower without its projector")
        yield Row("4.3", f"{name}: prefill instances save, %", prefill, share, "the tower without its projector")
    for table, published, systems in (("3", TABLE_3, ("encode", "prefill")), ("2", TABLE_2, ("DistServe", "EPD"))):
        for name, by_patches in published.items():
            for column, system in enumerate(systems):
                yield from _by_patches(
                    table, f"{name}, {system}", {patches: both[column] for patches, both in by_patches.items()}
                )
    for name, by_images in TABLE_8.items():
        for column, system in enumerate(("DistServe", "EPD")):
            yield from _by_images(f"{name}, {system}", {images: both[column] for images, both in by_images.items()})


def _by_patches(table: str, what: str, counts: Mapping[int, int]) -> Iterator[Row]:
    """Patches in memory are one number: the row with the fewest for each image gives the others."""
    (first, most), *others = sorted(counts.items())
    for patches, count in others:
        differs = (
            f"the given row is {most * first} to {(most + 1) * first} patches in memory, this one {count * patches} to "
            f"{(count + 1) * patches}, in the same units"
        )
        ours = (2 * most + 1) * first // (2 * patches)
        yield Row(table, f"{what}: {patches} patches an image", count, ours, f"from {most} of {first}", differs)


def _by_images(what: str, left: Mapping[int, float | None]) -> Iterator[Row]:
    """Memory of images grows with their number: two rows give the others."""
    (first, first_left), (second, second_left), *others = sorted(left.items())
    assert first_left is not None
    assert second_left is not None
    each = (first_left - second_left) / (second - first)
    rounding = 1 / (second - first)
    for images, published in others:
        ours, more = second_left - each * (images - second), rounding * (images - second)
        differs = f"the given rows are rounded to 1 %: {ours - more:.0f} to {ours + more:.0f} % would be left"
        yield Row(
            "8",
            f"{what}: {images} images",
            published,
            ours if ours > 0 else None,
            f"from {first} and {second} images",
            differs,
        )
