"""Idefics3 and SmolVLM: the tiles of an image, and the whole of it as one more."""

from collections.abc import Mapping

import torch

from triptych.engine.families.tiles import TileEncoder


class Idefics3Encoder(TileEncoder):
    """Its image processor and its vision encoder take samples of several images, and so tiles: [samples, tiles, ...]."""

    def _tiles(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return batch["pixel_values"][0]

    def _rows(self, pixels: torch.Tensor) -> torch.Tensor:
        made = self._model.get_image_features(pixels[None], return_dict=True).pooler_output
        # All tiles in one, up to transformers 5.19; later by samples, of which there is one.
        rows: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
        return rows.view(len(pixels), -1, rows.shape[-1])
