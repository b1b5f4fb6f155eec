"""The models that engines of vLLM serve: a text engine any of vLLM's registry, the others those that are tested."""

from collections.abc import Callable, Collection, Mapping

from vllm.model_executor.models.registry import ModelRegistry

from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.adapters import EncoderAdapter, ImageEncoder
from triptych.engine.families.qwen_vl import QwenEncoder
from triptych.engine.families.tiles import TileEncoder
from triptych.families.base import Family
from triptych.families.model_files import BadModel
from triptych.integrations.vllm.release import SUPPORTED

_REFUSED: Mapping[str, str] = {
    "cohere2_vision": "its answers differed from those of transformers",
    "granite4_vision": "vLLM packs the rows of its layers otherwise, which is not tested",
    "granite_speech": "its LoRA adapter would not be applied",
    "molmo2": "its rows are added to embeddings, which is not tested",
    "voxtral": "vLLM reads only Mistral's own files",
    "whisper": "vLLM gives no embeddings to a model with cross-attention",
}
"""Types of vLLM's registry that a text engine does not serve, with the reason."""
_ENCODERS: Mapping[str, Callable[[ImageEncoder, Checkpoint], EncoderAdapter]] = {
    "llava": TileEncoder,
    "qwen2_5_vl": QwenEncoder,
    "qwen3_vl": QwenEncoder,
}
"""How vLLM encodes items, by ``model_type``."""
_PULLED = frozenset({"llava", "qwen2_5_vl", "qwen3_vl"})
"""Types whose items a vLLM that runs by itself may pull."""


def check_served(model_type: str, architecture: str) -> None:
    """Raises BadModel for a model that a text engine does not serve. ``architecture`` is the class that saved the weights."""
    reason = _REFUSED.get(model_type)
    if reason is None and architecture not in ModelRegistry.get_supported_archs():
        reason = f"vLLM {SUPPORTED} has no model {architecture}"
    if reason is not None:
        raise BadModel(f"engine vllm does not serve model_type {model_type!r}: {reason}")


def check_pulled(family: Family) -> None:
    """Raises BadModel for a family whose items a vLLM that runs by itself cannot pull."""
    _check_listed(family, _PULLED)


def encoder_adapter(family: Family) -> Callable[[ImageEncoder, Checkpoint], EncoderAdapter]:
    """Adapter by which items are encoded. Raises BadModel for a family that is not encoded by vLLM."""
    _check_listed(family, _ENCODERS)
    return _ENCODERS[family.model_type]


def _check_listed(family: Family, served: Collection[str]) -> None:
    if family.model_type not in served:
        raise BadModel(
            f"engine vllm does not serve model_type {family.model_type!r}; it serves: {', '.join(sorted(served))}"
        )
