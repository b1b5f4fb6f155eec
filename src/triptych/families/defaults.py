"""transformers' defaults for these architectures, which published configuration files leave out."""

from collections.abc import Mapping

from triptych.families.model_files import Json

TEXT_DEFAULTS: Mapping[str, Json] = {
    "gemma3_text": {"hidden_size": 2304, "max_position_embeddings": 131072},
    "llama": {"hidden_size": 4096, "max_position_embeddings": 2048},
    "mistral": {"hidden_size": 4096, "max_position_embeddings": 131072},
    "qwen2": {"hidden_size": 4096, "max_position_embeddings": 32768},
    "qwen3": {"hidden_size": 4096, "max_position_embeddings": 32768},
}
"""Language models, by ``model_type``."""

VISION_DEFAULTS: Mapping[str, Json] = {
    "clip_vision_model": {"image_size": 224, "patch_size": 32},
    "idefics3_vision": {"image_size": 224, "patch_size": 32},
    "internvl_vision": {"image_size": [448, 448], "patch_size": [14, 14]},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16},
    "smolvlm_vision": {"image_size": 224, "patch_size": 32},
}
"""Vision encoders, by ``model_type``."""

CLIP_PROCESSOR_DEFAULTS: Json = {
    "do_resize": True,
    "do_center_crop": True,
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
}
"""Defaults of CLIP's image processor and those derived from it."""

CLASS_TOKENS: Mapping[str, int] = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Rows that a vision encoder outputs in addition to its patches."""
