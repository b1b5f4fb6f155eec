"""Encoders that process an image as independent tiles of one size: a single tile, or a grid of them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from triptych.domain.media import Shard
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.adapters import Features, ImageEncoder
from triptych.engine.media.image_processor import ImagePreparer
from triptych.engine.media.item import MediaItem


class TileEncoder:
    """An item is its tiles [tiles, channels, height, width]; its embedding is the concatenation of their rows."""

    options: ClassVar[Mapping[str, Any]] = {}
    """Options that the family's processor always passes to its image processor."""

    def __init__(self, model: PreTrainedModel | ImageEncoder, checkpoint: Checkpoint) -> None:
        self._model: Any = model
        self._images = ImagePreparer(checkpoint.files, self.options)
        vision = self._model.config.vision_config
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        self._shape = (vision.num_channels, height, width)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._images.settings

    def prepare(self, item: MediaItem) -> Features:
        return {"pixel_values": self._checked_tiles(item)}

    def prepare_shard(self, item: MediaItem, shard: Shard) -> Features:
        """A unit is a tile."""
        tiles = self._checked_tiles(item)
        if len(tiles) != shard.of:
            raise ValueError(f"the processor made {len(tiles)} tiles, not the {shard.of} that were counted")
        return {"pixel_values": tiles[shard.first : shard.first + shard.count].clone()}

    def _checked_tiles(self, item: MediaItem) -> torch.Tensor:
        tiles = self._tiles(self._images.process([self._images.open(item)]))
        shape = tuple(tiles.shape[1:])
        if shape != self._shape:
            raise ValueError(f"the processor made tiles of {shape}, the encoder takes {self._shape}")
        return tiles

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        pixels = torch.cat([features["pixel_values"] for features in batch])
        rows = self._rows(pixels.to(device=self._model.device, dtype=self._model.dtype))
        tiles = [len(features["pixel_values"]) for features in batch]
        return [(part.flatten(0, 1),) for part in torch.split(rows, tiles)]

    def _tiles(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tiles of one image, from the image processor's output."""
        return batch["pixel_values"]

    def _rows(self, pixels: torch.Tensor) -> torch.Tensor:
        """[tiles, channels, height, width] -> [tiles, rows, hidden]."""
        rows = self._model.get_image_features(pixels, return_dict=True).pooler_output
        return rows if isinstance(rows, torch.Tensor) else torch.stack(tuple(rows))
