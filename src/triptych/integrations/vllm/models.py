"""Models of vLLM that need a change to run without their vision encoder."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.model_executor.models.registry import ModelRegistry


class _WithDeepStack:
    """Takes DeepStack rows also where no vision encoder is loaded: vLLM 0.32 takes them only beside one."""

    config: Any
    visual_dim: int

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        indexes = self.config.vision_config.deepstack_visual_indexes
        made: Any = getattr(self, "deepstack_input_embeds", None)
        if not indexes or (made and not made[0].is_meta):
            return
        self.use_deepstack = True
        self.deepstack_num_level = len(indexes)
        self.multiscale_dim = self.visual_dim * self.deepstack_num_level
        rows, width = vllm_config.scheduler_config.max_num_batched_tokens, self.config.text_config.hidden_size
        self.deepstack_input_embeds = [torch.zeros(rows, width) for _ in indexes]
        self.deepstack_input_embeds_num_tokens = 0


class _WithoutNewline:
    """Does not load the learned row at the end of each line of an image: encoders send it with the others."""

    image_newline: torch.nn.Parameter

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        del self.image_newline

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        kept = ((name, weight) for name, weight in weights if not name.endswith("image_newline"))
        loaded: set[str] = super().load_weights(kept)  # type: ignore[misc]
        return loaded


_CHANGES: Mapping[str, type] = {
    "CohereCompassForConditionalGeneration": _WithDeepStack,
    "LlavaNextForConditionalGeneration": _WithoutNewline,
    "LlavaOnevisionForConditionalGeneration": _WithoutNewline,
    "Qwen3OmniMoeForConditionalGeneration": _WithDeepStack,
    "Qwen3VLForConditionalGeneration": _WithDeepStack,
    "Qwen3VLMoeForConditionalGeneration": _WithDeepStack,
}
"""Changes by architecture."""


def register_changes(architectures: Iterable[str]) -> None:
    """Let vLLM use the changed models in place of its own, in this process."""
    for name in architectures:
        change = _CHANGES.get(name)
        if change is None:
            continue
        own = ModelRegistry.models[name].load_model_cls()
        if not issubclass(own, change):
            ModelRegistry.register_model(name, type(own.__name__, (change, own), {}))
