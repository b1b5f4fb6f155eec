"""LLaVA: one tensor of embeddings per image replaces its run of placeholders; nothing else crosses the boundary."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from triptych.domain.embedding import TensorSpec
from triptych.engine.halves import Features
from triptych.engine.tensors import domain_dtype
from triptych.families.base import Family

EMBEDS = "embeds"


class LlavaEncoder:
    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self._model: Any = model
        self._family = family
        vision = self._model.config.vision_config
        self._shape = (vision.num_channels, vision.image_size, vision.image_size)

    def tokens(self, features: Features) -> int:
        shape = tuple(features["pixel_values"].shape)
        if shape != self._shape:
            raise ValueError(f"the processor made {shape}, the tower takes {self._shape}")
        return self._family.max_tokens_per_item  # every image takes the same number

    def outputs(self, tokens: int) -> tuple[TensorSpec, ...]:
        return _embeds(self._model, self._family, tokens)

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        pixels = torch.stack([features["pixel_values"] for features in batch])
        pixels = pixels.to(device=self._model.device, dtype=self._model.dtype)
        return [(embeds,) for embeds in self._model.get_image_features(pixels, return_dict=True).pooler_output]


class LlavaText:
    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self._model: Any = model
        self._family = family

    @property
    def decoder(self) -> PreTrainedModel:
        decoder: PreTrainedModel = self._model.model.language_model
        return decoder

    def expected(self, tokens: int) -> tuple[TensorSpec, ...]:
        return _embeds(self._model, self._family, tokens)

    def splice(self, rows: torch.Tensor, item: Features, first: int) -> None:
        rows.copy_(item[EMBEDS][first : first + len(rows)])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.lm_head(hidden)
        return logits


def _embeds(model: PreTrainedModel, family: Family, tokens: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec(EMBEDS, domain_dtype(model.dtype), (tokens, family.hidden_size)),)
