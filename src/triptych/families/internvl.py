"""InternVL: an image is cut into a grid of square tiles close to its aspect ratio, followed by the whole image."""

from dataclasses import dataclass
from typing import Self

from triptych.domain.media import MediaInfo, Modality
from triptych.families.base import Placeholders, PromptReplacement, refuse_unless
from triptych.families.defaults import TEXT_DEFAULTS, VISION_DEFAULTS
from triptych.families.fields import integer, named_token, section, square, tile_limit
from triptych.families.model_files import BadModel, Json, ModelFiles
from triptych.families.plain import Plain

_PROCESSOR_DEFAULTS: Json = {"size": {"height": 384, "width": 384}, "min_patches": 1, "max_patches": 12}
_DEFAULTS: Json = {"image_token_id": 151667, "image_seq_length": 256, "downsample_ratio": 0.5}


@dataclass(frozen=True, slots=True)
class InternVl(Plain):
    """A tile is ``tile_px`` square and has ``tokens_per_tile`` tokens; ``begin`` and ``end`` enclose an image."""

    begin: str
    end: str
    tokens_per_tile: int
    tile_px: int
    min_tiles: int
    max_tiles: int
    model_type: str = "internvl"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        config = {**_DEFAULTS, **files.config}
        text = section(config, "text_config", "qwen2", TEXT_DEFAULTS)
        processor = {**_PROCESSOR_DEFAULTS, **files.image_processor}
        return cls(
            placeholder_id=integer(config, "image_token_id"),
            begin=named_token(files, "start_image_token"),
            end=named_token(files, "end_image_token"),
            hidden_size=integer(text, "hidden_size"),
            context_length=integer(text, "max_position_embeddings"),
            tokens_per_tile=_tokens_per_tile(config, files.processor),
            tile_px=_tile_px(config, processor),
            min_tiles=integer(processor, "min_patches"),
            max_tiles=tile_limit(processor, "max_patches"),
        )

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        return (self.begin, Placeholders(self.placeholder_id, self.tiles(info) * self.tokens_per_tile), self.end)

    def units(self, info: MediaInfo) -> tuple[int, ...]:
        """Units of an image: one per tile. The vision encoder computes each by itself."""
        return (self.tokens_per_tile,) * self.tiles(info)

    def tiles(self, info: MediaInfo) -> int:
        """Number of tiles, including the whole image unless the grid is a single tile. Raises InvalidMedia."""
        refuse_unless(info, Modality.IMAGE)
        columns, rows = self._grid(info.width, info.height) if self.max_tiles > 1 else (1, 1)
        return columns * rows + (1 if columns * rows > 1 else 0)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows with the closest aspect ratio, like transformers' ``get_optimal_tiled_canvas``.

        On a tie, the last one that is at most twice as large as the image.
        """
        most = self.max_tiles
        grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1)]
        allowed = [grid for grid in grids if self.min_tiles <= grid[0] * grid[1] <= most]
        best, smallest = (1, 1), float("inf")
        for columns, rows in sorted(allowed, key=lambda grid: grid[0] * grid[1]):
            difference = abs(width / height - columns / rows)
            fills = width * height > 0.5 * self.tile_px * self.tile_px * columns * rows
            if difference < smallest or (difference == smallest and fills):
                best, smallest = (columns, rows), difference
        return best


def _tokens_per_tile(config: Json, processor: Json) -> int:
    vision = section(config, "vision_config", "internvl_vision", VISION_DEFAULTS)
    if vision["model_type"] != "internvl_vision":
        raise BadModel(f"vision_config.model_type is {vision['model_type']!r}; internvl is served with internvl_vision")
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy != "default":
        raise BadModel(
            f"vision_feature_select_strategy is {strategy!r}, not 'default': with the class token the rows form no square"
        )
    side = int(square(vision, "image_size") // square(vision, "patch_size") * config["downsample_ratio"])
    written = integer({"image_seq_length": 256, **processor}, "image_seq_length")
    if side * side != written:
        raise BadModel(f"image_seq_length is {written}, the vision encoder makes {side * side} rows of a tile")
    return written


def _tile_px(config: Json, processor: Json) -> int:
    encoder = square(section(config, "vision_config", "internvl_vision", VISION_DEFAULTS), "image_size")
    tile = square(processor, "size")
    if tile != encoder:
        raise BadModel(f"the image processor makes tiles of {tile} pixels, the vision encoder takes {encoder}")
    return tile
