"""The models that engines of vLLM serve: any of vLLM's registry, but for those that are known to differ."""

import logging
from collections.abc import Callable, Mapping

from vllm.model_executor.models.registry import ModelRegistry

from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.adapters import EncoderAdapter, ImageEncoder
from triptych.engine.families.qwen_vl import QwenEncoder
from triptych.engine.families.tiles import TileEncoder
from triptych.families.base import Family
from triptych.families.model_files import BadModel
from triptych.integrations.vllm.release import MODEL_TYPES, SUPPORTED

logger = logging.getLogger(__name__)

_REFUSED: Mapping[str, str] = {
    "cohere2_vision": "its answers differed from those of transformers",
    "granite4_vision": "vLLM packs the rows of its layers otherwise, which is not tested",
    "granite_speech": "its LoRA adapter would not be applied",
    "molmo2": "its rows are added to embeddings, which is not tested",
    "voxtral": "vLLM reads only Mistral's own files",
    "whisper": "vLLM gives no embeddings to a model with cross-attention",
}
"""Types of vLLM's registry that are not served, with the reason."""
_DIFFERS = "its rows are not those of transformers"
NOT_ENCODED: Mapping[str, str] = {
    "aria": _DIFFERS,
    "exaone4_5": "vLLM normalizes its pixels otherwise",
    "glm_ocr": _DIFFERS,
    "hunyuan_vl": "vLLM's encoder of it does not run on a CPU, where it could be tested",
    "llava_next_video": "vLLM encodes only its videos",
    "llava_onevision": "several images of a request are encoded without tiles, which vLLM does not do",
    "paddleocr_vl": _DIFFERS,
}
"""Types that vLLM does not encode, with the reason."""
_PREPARED: Mapping[str, Callable[[ImageEncoder, Checkpoint], EncoderAdapter]] = {
    "llava": TileEncoder,
    "qwen2_5_vl": QwenEncoder,
    "qwen2_vl": QwenEncoder,
    "qwen3_vl": QwenEncoder,
}
"""Types whose items Triptych prepares: their videos, and shards of those. vLLM's own processor prepares all others."""
_PULLED = frozenset({"llava", "qwen2_5_vl", "qwen3_vl"})
"""Types whose items a vLLM that runs by itself may pull."""
_COMPARED = MODEL_TYPES | {"cohere_compass"}
"""Types whose answers have been compared with those of another engine (docs/vllm.md)."""


def check_served(model_type: str, architecture: str) -> None:
    """Warn of a model that is not tested. Raises BadModel for one that is not served.

    ``architecture`` is the class that saved the weights.
    """
    reason = _REFUSED.get(model_type)
    if reason is None and architecture not in ModelRegistry.get_supported_archs():
        reason = f"vLLM {SUPPORTED} has no model {architecture}"
    if reason is not None:
        raise BadModel(f"engine vllm does not serve model_type {model_type!r}: {reason}")
    if model_type not in _COMPARED:
        logger.warning("engine vllm is not tested with model_type %r: compare answers first", model_type)


def check_pulled(family: Family) -> None:
    """Raises BadModel for a family whose items a vLLM that runs by itself cannot pull."""
    if family.model_type not in _PULLED:
        raise BadModel(
            f"engine vllm does not serve model_type {family.model_type!r}; it serves: {', '.join(sorted(_PULLED))}"
        )


def encoder_adapter(family: Family, architecture: str) -> Callable[[ImageEncoder, Checkpoint], EncoderAdapter] | None:
    """Adapter by which Triptych prepares items; None where vLLM does. Raises BadModel for a model that is not encoded by vLLM."""
    check_served(family.model_type, architecture)
    if (reason := NOT_ENCODED.get(family.model_type)) is not None:
        raise BadModel(f"engine vllm does not encode for model_type {family.model_type!r}: {reason}")
    return _PREPARED.get(family.model_type)
