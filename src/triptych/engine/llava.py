"""LLaVA: one tensor of embeddings per image replaces its run of placeholders; nothing else crosses the boundary."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from triptych.domain.media import MediaInfo
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.halves import Features
from triptych.engine.images import ImagePreparer


class LlavaEncoder:
    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model: Any = model
        self._images = ImagePreparer(checkpoint.files)
        vision = self._model.config.vision_config
        self._shape = (vision.num_channels, vision.image_size, vision.image_size)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._images.settings

    def prepare(self, media: bytes, info: MediaInfo) -> Features:
        features = self._images.prepare(media, info)
        shape = tuple(features["pixel_values"].shape)
        if shape != self._shape:
            raise ValueError(f"the processor made {shape}, the tower takes {self._shape}")
        return features

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        pixels = torch.stack([features["pixel_values"] for features in batch])
        pixels = pixels.to(device=self._model.device, dtype=self._model.dtype)
        return [(embeds,) for embeds in self._model.get_image_features(pixels, return_dict=True).pooler_output]
