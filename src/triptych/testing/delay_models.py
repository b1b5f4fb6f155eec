"""Model directories for engines that sleep: configuration and tokenizer of a family, without weights.

The tokenizer is the demo model's, so that nothing is downloaded. An image takes as many tokens as in the published models, but
embeddings are narrow.
"""

import json
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Any

from triptych.demo import MODEL_DIR

_TILE_PX, _PATCH_PX = 336, 14
_MAX_TILES = 4
_CONTEXT = 4096
_HIDDEN = 128
_COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class Attention(StrEnum):
    """Where the language model reads an image."""

    DECODER_ONLY = "decoder-only"
    """In the prompt: 576 positions per image, as LLaVA."""
    CROSS_ATTENTION = "cross-attention"
    """Beside the prompt, which has one position per image, as Llama 3.2 Vision."""


def write_delay_model(directory: Path, attention: Attention) -> Path:
    """Write the files of such a model into a new directory, and return it. Raises OSError."""
    directory.mkdir(parents=True)
    for name in _COPIED:
        shutil.copy(MODEL_DIR / name, directory / name)
    made = _decoder_only() if attention is Attention.DECODER_ONLY else _cross_attention()
    for name, document in made.items():
        (directory / name).write_text(json.dumps(document, indent=1))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return directory


def _decoder_only() -> dict[str, Any]:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    config["image_seq_length"] = (_TILE_PX // _PATCH_PX) ** 2
    config["text_config"] |= {"hidden_size": _HIDDEN, "max_position_embeddings": _CONTEXT}
    config["vision_config"] |= {"image_size": _TILE_PX, "patch_size": _PATCH_PX}
    sides = {"height": _TILE_PX, "width": _TILE_PX}
    image = json.loads((MODEL_DIR / "preprocessor_config.json").read_text()) | {"crop_size": sides, "size": sides}
    processor = json.loads((MODEL_DIR / "processor_config.json").read_text()) | {
        "image_processor": image,
        "patch_size": _PATCH_PX,
    }
    return {"config.json": config, "preprocessor_config.json": image, "processor_config.json": processor}


def _cross_attention() -> dict[str, Any]:
    demo = json.loads((MODEL_DIR / "config.json").read_text())
    text = demo["text_config"] | {
        "model_type": "mllama_text_model",
        "hidden_size": _HIDDEN,
        "max_position_embeddings": _CONTEXT,
        "cross_attention_layers": [1, 3],
    }
    vision = {
        "model_type": "mllama_vision_model",
        "image_size": _TILE_PX,
        "patch_size": _PATCH_PX,
        "max_num_tiles": _MAX_TILES,
    }
    config = {
        "architectures": ["MllamaForConditionalGeneration"],
        "model_type": "mllama",
        "image_token_index": demo["image_token_index"],
        "text_config": text,
        "vision_config": vision,
    }
    image = {
        "image_processor_type": "MllamaImageProcessor",
        "size": {"height": _TILE_PX, "width": _TILE_PX},
        "max_image_tiles": _MAX_TILES,
    }
    return {"config.json": config, "preprocessor_config.json": image}
