"""LLaVA-NeXT and LLaVA-OneVision: an image and its tiles, joined line by line with learned newlines."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from triptych.domain.media import Shard
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.adapters import Features
from triptych.engine.media.image_processor import ImagePreparer
from triptych.engine.media.item import MediaItem
from triptych.families.anyres import AnyRes
from triptych.families.llava_onevision import WHOLE
from triptych.families.model_files import BadModel

_KEEPS_SELECTED = hasattr(output_capturing, "select_hidden_states")
"""Whether an encoder can be told which layers' results to keep; older releases of transformers keep all."""


class LlavaNextEncoder:
    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        if not isinstance(checkpoint.family, AnyRes):
            raise BadModel(f"{checkpoint.family.model_type} does not see images of any resolution")
        self._model: Any = model.model
        self._config: Any = model.config
        self._family = checkpoint.family
        self._images = ImagePreparer(checkpoint.files)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._images.settings

    def prepare(self, item: MediaItem) -> Features:
        units = len(self._family.units(item.info))
        return self.prepare_shard(item, Shard(0, units, units))

    def prepare_shard(self, item: MediaItem, shard: Shard) -> Features:
        """Prepare a shard, whose units are the whole image and the rows of tiles.

        Returns pixels [tiles, channels, height, width] of the tiles that the shard needs, their numbers in the image,
        the image's height and width, its number of tiles, and the start and end of the shard's rows.
        """
        features, part = self._pixels(item), self._family.part(item.info, shard)
        tiles = features["pixel_values"]
        if len(tiles) != part.of:
            raise ValueError(f"the processor made {len(tiles)} tiles, not the {part.of} that were counted")
        numbers = torch.tensor(part.tiles)
        return {
            "pixel_values": tiles[numbers],
            "tiles": numbers,
            "image_sizes": features["image_sizes"],
            "part": torch.tensor([part.of, part.rows.start, part.rows.stop]),
        }

    def _pixels(self, item: MediaItem) -> Features:
        return self._images.prepare(item)

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """Encode all tiles in one pass. A tile that a shard omits does not affect the shard's rows."""
        views = self._rows(torch.cat([features["pixel_values"] for features in batch]))
        encoded: list[tuple[torch.Tensor, ...]] = []
        for features, rows in zip(
            batch, torch.split(views, [len(features["tiles"]) for features in batch]), strict=True
        ):
            row, begin, end = features["part"].tolist()
            tiles = rows.new_zeros(row, *rows.shape[1:])
            tiles[features["tiles"].to(rows.device)] = rows
            (joined,), _ = self._model.pack_image_features(
                [tiles], features["image_sizes"][None], image_newline=self._model.image_newline, **self._packing
            )
            encoded.append((joined[begin:end],))
        return encoded

    def _rows(self, pixels: torch.Tensor) -> torch.Tensor:
        """[tiles, channels, height, width] -> [tiles, rows, hidden], as ``get_image_features`` does before it joins
        tiles.
        """
        layer = self._config.vision_feature_layer
        layers = [layer] if isinstance(layer, int) else list(layer)
        states = self._model.vision_tower(
            pixels.to(device=self._model.device, dtype=self._model.dtype),
            output_hidden_states=layers if _KEEPS_SELECTED else True,
            return_dict=True,
        ).hidden_states
        rows = torch.cat([states[number] for number in layers], dim=-1)
        if self._config.vision_feature_select_strategy == "default":
            rows = rows[:, 1:]
        projected: torch.Tensor = self._model.multi_modal_projector(rows)
        return projected

    @property
    def _packing(self) -> Mapping[str, Any]:
        return {"vision_feature_select_strategy": self._config.vision_feature_select_strategy}


class LlavaOneVisionEncoder(LlavaNextEncoder):
    """An image without tiles has pixels [1, channels, height, width]."""

    def _pixels(self, item: MediaItem) -> Features:
        if WHOLE not in item.info.options:
            return super()._pixels(item)
        # The image processor depends on the number of images in a sample; the second one is tiny.
        sample = [self._images.open(item), Image.new("RGB", (1, 1))]
        features = self._images.process([sample])
        return {name: features[name][0] for name in ("pixel_values", "image_sizes")}

    @property
    def _packing(self) -> Mapping[str, Any]:
        return {"vision_aspect_ratio": self._config.vision_aspect_ratio}
