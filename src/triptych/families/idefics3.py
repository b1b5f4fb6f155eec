"""Idefics3 and SmolVLM: rows of tiles, each labelled with its row and column, then the whole image."""

from dataclasses import dataclass
from math import ceil
from typing import Self

from triptych.domain.media import MediaInfo, Modality
from triptych.families.base import Placeholders, PromptReplacement, refuse_unless
from triptych.families.defaults import TEXT_DEFAULTS, VISION_DEFAULTS
from triptych.families.fields import integer, named_token, section, square
from triptych.families.model_files import BadModel, Json, ModelFiles
from triptych.families.plain import Plain

_DEFAULTS: Json = {"image_token_id": 128257, "scale_factor": 2}
_PROCESSOR_DEFAULTS: Json = {
    "do_resize": True,
    "do_image_splitting": True,
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
}
_MAX_PX = 4096
"""Longest side to which transformers resizes an image."""


@dataclass(frozen=True, slots=True)
class Idefics3(Plain):
    """An image's longer side becomes ``longest_px``; tiles have ``tile_px`` by ``tile_px`` pixels.

    If ``splits`` is false there is only one tile, the whole image. ``around`` precedes each tile and ends the item;
    ``whole`` precedes the tile with the whole image.
    """

    around: str
    whole: str
    tokens_per_tile: int
    tile_px: int
    longest_px: int
    splits: bool
    model_type: str

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        config = {**_DEFAULTS, **files.config}
        text = section(config, "text_config", "llama", TEXT_DEFAULTS)
        processor = {**_PROCESSOR_DEFAULTS, **files.image_processor}
        if not processor["do_resize"]:
            raise BadModel("do_resize of the image processor is false: tiles would have no common size")
        tile_px = square(processor, "max_image_size")
        return cls(
            placeholder_id=integer(config, "image_token_id"),
            around=named_token(files, "fake_image_token", "<fake_token_around_image>"),
            whole=named_token(files, "global_image_token", "<global-img>"),
            hidden_size=integer(text, "hidden_size"),
            context_length=integer(text, "max_position_embeddings"),
            tokens_per_tile=_tokens_per_tile(config, files.processor, tile_px),
            tile_px=tile_px,
            longest_px=min(_longest_px(processor), _MAX_PX),
            splits=bool(processor["do_image_splitting"]),
            model_type=files.model_type,
        )

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        rows, columns = self.grid(info)
        tile = Placeholders(self.placeholder_id, self.tokens_per_tile)
        parts: list[str | Placeholders] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                parts += [f"{self.around}<row_{row}_col_{column}>", tile]
            parts.append("\n")
        before = "\n" if rows else ""
        return (*parts, f"{before}{self.around}{self.whole}", tile, self.around)

    def units(self, info: MediaInfo) -> tuple[int, ...]:
        """Units of an image: one per tile, the whole image last. The vision encoder computes each by itself."""
        rows, columns = self.grid(info)
        return (self.tokens_per_tile,) * (rows * columns + 1)

    def grid(self, info: MediaInfo) -> tuple[int, int]:
        """Rows and columns of tiles; (0, 0) for an image that fits one tile. Raises InvalidMedia."""
        refuse_unless(info, Modality.IMAGE)
        if not self.splits:
            return 0, 0
        width, height = self._resized(info.width, info.height)
        aspect_ratio = width / height
        if width >= height:
            width = self._to_tiles(width)
            height = self._to_tiles(int(width / aspect_ratio))
        else:
            height = self._to_tiles(height)
            width = self._to_tiles(int(height * aspect_ratio))
        if max(width, height) <= self.tile_px:
            return 0, 0
        return height // self.tile_px, width // self.tile_px

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """The longer side becomes ``longest_px``; the shorter is rounded up to an even number, like in transformers."""
        aspect_ratio = width / height
        if width >= height:
            shorter = int(self.longest_px / aspect_ratio)
            return self.longest_px, max(shorter + shorter % 2, 1)
        shorter = int(self.longest_px * aspect_ratio)
        return max(shorter + shorter % 2, 1), self.longest_px

    def _to_tiles(self, px: int) -> int:
        return ceil(px / self.tile_px) * self.tile_px


def _longest_px(processor: Json) -> int:
    size = processor["size"]
    if not isinstance(size, dict) or size.get("longest_edge") is None:
        raise BadModel(f"the image processor's size is {size!r}: longest_edge is required")
    return integer(size, "longest_edge")


def _tokens_per_tile(config: Json, processor: Json, tile_px: int) -> int:
    vision = section(config, "vision_config", f"{config.get('model_type')}_vision", VISION_DEFAULTS)
    side = tile_px // square(vision, "patch_size")
    tokens = side * side // integer(config, "scale_factor") ** 2
    written = integer({"image_seq_len": 169, **processor}, "image_seq_len")
    if written != tokens or tile_px > square(vision, "image_size"):
        raise BadModel(
            f"image_seq_len is {written} and tiles have {tile_px} pixels; the vision encoder takes "
            f"{square(vision, 'image_size')} pixels and makes {tokens} rows of a tile"
        )
    return tokens
