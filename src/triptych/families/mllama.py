"""Llama 3.2 Vision: an image is one prompt position; its tiles are attended to by cross-attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.families.base import Placeholders, PromptReplacement, refuse_unless
from triptych.families.defaults import TEXT_DEFAULTS, VISION_DEFAULTS
from triptych.families.fields import integer, section, tile_limit
from triptych.families.model_files import BadModel, Json, ModelFiles
from triptych.families.plain import Plain

TILES = "tiles"
"""Name of the tensor [tiles, states per tile, hidden size] that text after an image attends to."""
PADDING = "padding"
"""Name of the tensor of an image's missing tiles, which text before all images attends to as well."""

_DEFAULTS: Json = {"image_token_index": 128_256}
_PROCESSOR_DEFAULTS: Json = {"size": {"height": 224, "width": 224}, "max_image_tiles": 4}


@dataclass(frozen=True, slots=True)
class Mllama(Plain):
    """``tile_px`` is the side of a tile; the encoder computes ``states_per_tile`` for each, always for ``max_tiles``."""

    tile_px: int
    max_tiles: int
    states_per_tile: int
    model_type: str = "mllama"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        text = section(files.config, "text_config", "mllama_text_model", TEXT_DEFAULTS)
        vision = section(files.config, "vision_config", "mllama_vision_model", VISION_DEFAULTS)
        tile_px, max_tiles = integer(vision, "image_size"), tile_limit(vision, "max_num_tiles")
        _check_processor({**_PROCESSOR_DEFAULTS, **files.image_processor}, tile_px, max_tiles)
        ratios = vision["supported_aspect_ratios"] or arrangements(4)
        if [list(ratio) for ratio in ratios] != [list(ratio) for ratio in arrangements(max_tiles)]:
            raise BadModel(f"vision_config.supported_aspect_ratios are not those of {max_tiles} tiles: {ratios}")
        return cls(
            placeholder_id=integer({**_DEFAULTS, **files.config}, "image_token_id", "image_token_index"),
            hidden_size=integer(text, "hidden_size"),
            context_length=integer(text, "max_position_embeddings"),
            tile_px=tile_px,
            max_tiles=max_tiles,
            states_per_tile=(tile_px // integer(vision, "patch_size")) ** 2 + 1,
        )

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        refuse_unless(info, Modality.IMAGE)
        return (Placeholders(self.placeholder_id, 1),)

    def outputs(self, info: MediaInfo, dtype: DType) -> tuple[TensorSpec, ...]:
        refuse_unless(info, Modality.IMAGE)
        tiles = self.tiles(info.width, info.height)
        return tuple(
            TensorSpec(name, dtype, (count, self.states_per_tile, self.hidden_size))
            for name, count in ((TILES, tiles), (PADDING, self.max_tiles - tiles))
        )

    def tiles(self, width: int, height: int) -> int:
        """Number of tiles of an image, like transformers' ``get_optimal_tiled_canvas``.

        Of the arrangements that hold the image unshrunk it takes the one that enlarges it least. Otherwise it takes the
        one that shrinks it least; on a tie the smallest.
        """
        scales = [
            (min(rows * self.tile_px / height, columns * self.tile_px / width), rows * columns)
            for rows, columns in arrangements(self.max_tiles)
        ]
        chosen = min((scale for scale, _ in scales if scale >= 1), default=None)
        if chosen is None:
            chosen = max(scale for scale, _ in scales)
        return min(tiles for scale, tiles in scales if scale == chosen)


def arrangements(max_tiles: int) -> list[tuple[int, int]]:
    """Rows and columns of every canvas of at most ``max_tiles`` tiles, in the encoder's numbering."""
    sides = range(1, max_tiles + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= max_tiles]


def _check_processor(processor: Mapping[str, Any], tile_px: int, max_tiles: int) -> None:
    size = processor["size"]
    made_size = (size.get("height"), size.get("width")) if isinstance(size, dict) else (size, size)
    if made_size != (tile_px, tile_px):
        raise BadModel(f"the image processor's size is {size!r}, vision_config.image_size is {tile_px}")
    if processor["max_image_tiles"] != max_tiles:
        raise BadModel(
            f"the image processor's max_image_tiles is {processor['max_image_tiles']!r}, "
            f"vision_config.max_num_tiles is {max_tiles}"
        )
