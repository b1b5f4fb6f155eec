"""LLaVA-NeXT and LLaVA-OneVision: an image and its tiles, joined row by row with learned newlines."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedModel

from triptych.domain.media import MediaInfo
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.halves import Features
from triptych.engine.images import ImagePreparer
from triptych.families.llava_onevision import WHOLE


class LlavaNextEncoder:
    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model: Any = model
        self._images = ImagePreparer(checkpoint.files)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._images.settings

    def prepare(self, media: bytes, info: MediaInfo) -> Features:
        """Pixels [1 + tiles, channels, height, width] of the whole and its tiles, and the image's height and width."""
        features = self._images.prepare(media, info)
        return {name: features[name] for name in ("pixel_values", "image_sizes")}

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        return self._encode(batch)

    def _encode(self, batch: Sequence[Features], **options: Any) -> list[tuple[torch.Tensor, ...]]:
        """One pass; ``options`` are the model's."""
        pixels = torch.cat([features["pixel_values"] for features in batch])
        sizes = torch.stack([features["image_sizes"] for features in batch])
        pixels = pixels.to(device=self._model.device, dtype=self._model.dtype)
        features = self._model.get_image_features(pixels, sizes, return_dict=True, **options)
        return [(rows,) for rows in features.pooler_output]


class LlavaOneVisionEncoder(LlavaNextEncoder):
    """An image that is seen whole only has no tiles: its pixels are [1, channels, height, width]."""

    def prepare(self, media: bytes, info: MediaInfo) -> Features:
        if WHOLE not in info.options:
            return super().prepare(media, info)
        # The image processor goes by how many images a sample has; the other one costs next to nothing.
        sample = [self._images.open(media, info), Image.new("RGB", (1, 1))]
        features = self._images.process([sample])
        return {name: features[name][0] for name in ("pixel_values", "image_sizes")}

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """Images with tiles and images without them in a pass of their own each: so the model takes them."""
        encoded: dict[int, tuple[torch.Tensor, ...]] = {}
        for whole in (False, True):
            numbers = [number for number, one in enumerate(batch) if (len(one["pixel_values"]) == 1) is whole]
            if numbers:
                options = {"batch_num_images": [len(numbers) + 1]} if whole else {}
                encoded |= zip(numbers, self._encode([batch[number] for number in numbers], **options), strict=True)
        return [encoded[number] for number in range(len(batch))]
