"""ModServe: tiles, tokens and encoders of an image of 896 x 896 pixels (table 1), from configurations alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers.epd_serve import CONFIGS
from benchmarks.papers.rows import Row
from triptych.domain.embedding import DType, embedding_tokens
from triptych.domain.media import MediaInfo, Modality
from triptych.families.architecture import Architecture
from triptych.families.model_files import ModelFiles

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
