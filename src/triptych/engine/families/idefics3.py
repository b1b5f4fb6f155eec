"""Idefics3 and SmolVLM: the tiles of an image, plus the whole image as one more tile."""

from collections.abc import Mapping

import torch

from triptych.engine.families.tiles import TileEncoder


class Idefics3Encoder(TileEncoder):
    """Image processor and vision encoder take samples of several images, hence tiles [samples, tiles, ...]."""

    def _tiles(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return batch["pixel_values"][0]

    def _rows(self, pixels: torch.Tensor) -> torch.Tensor:
        encoded = self._model.get_image_features(pixels[None], return_dict=True).pooler_output
        # One tensor of all tiles up to transformers 5.19; later one per sample, of which there is one.
        rows: torch.Tensor = encoded if isinstance(encoded, torch.Tensor) else encoded[0]
        return rows.view(len(pixels), -1, rows.shape[-1])
