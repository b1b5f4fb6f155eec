"""Images of any resolution, as LLaVA-NeXT and LLaVA-OneVision see them: the whole, and a grid of tiles without its padding.

The arithmetic is transformers', step by step: another order of roundings gives other counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.domain.media import MediaInfo
from triptych.families.fields import integer, square
from triptych.families.model_files import BadModel, Json, ModelFiles

Pinpoints = tuple[tuple[int, int], ...]
"""Heights and widths, in pixels, that an image may be fitted into."""


@dataclass(frozen=True, slots=True)
class Grid:
    """``tile_px`` is the side of a tile, which the tower turns into ``side`` by ``side`` rows."""

    pinpoints: Pinpoints
    tile_px: int
    side: int

    def tiles(self, info: MediaInfo) -> tuple[int, int]:
        """Rows and columns of tiles that an image is fitted into: what keeps most of it, then what wastes least."""

        def fit(pinpoint: tuple[int, int]) -> tuple[int, int]:
            height, width = pinpoint
            scale = min(width / info.width, height / info.height)
            covered = min(int(info.width * scale) * int(info.height * scale), info.width * info.height)
            return covered, covered - width * height

        height, width = max(self.pinpoints, key=fit)
        return height // self.tile_px, width // self.tile_px

    def unpadded(self, info: MediaInfo) -> tuple[int, int]:
        """Height and width, in embeddings, of what the tiles show of the image itself."""
        rows, columns = self.tiles(info)
        height, width = rows * self.side, columns * self.side
        if info.width / info.height > width / height:
            shown = int(round(info.height * (width / info.width), 7))
            return height - (height - shown) // 2 * 2, width
        shown = int(round(info.width * (height / info.height), 7))
        return height, width - (width - shown) // 2 * 2


def load_grid(files: ModelFiles, vision: Json, defaults: Sequence[Sequence[int]], processor: Json) -> Grid:
    """``defaults`` are the family's pinpoints, ``processor`` its image processor with defaults. Raises BadModel."""
    if not processor["do_resize"]:
        raise BadModel("do_resize of the image processor is false: tiles would have no common size")
    tile_px = square(processor, "crop_size" if processor["do_center_crop"] else "size")
    tower = square(vision, "image_size")
    pinpoints = _pinpoints(files.config, defaults)
    if tile_px != tower or _pinpoints(files.image_processor, defaults) != pinpoints:
        raise BadModel(
            f"the image processor makes tiles of {tile_px} pixels, the vision tower takes {tower}: they and the "
            "image_grid_pinpoints of the image processor and of config.json must agree"
        )
    if any(side % tower for pinpoint in pinpoints for side in pinpoint):
        raise BadModel(f"image_grid_pinpoints are no multiples of the vision tower's {tower} pixels")
    return Grid(pinpoints, tower, tower // integer(vision, "patch_size"))


def _pinpoints(config: Json, defaults: Sequence[Sequence[int]]) -> Pinpoints:
    found = config.get("image_grid_pinpoints") or defaults
    try:
        pinpoints = tuple((int(height), int(width)) for height, width in found)
    except (TypeError, ValueError):
        pinpoints = ()
    if not pinpoints or any(side < 1 for pinpoint in pinpoints for side in pinpoint):
        raise BadModel("image_grid_pinpoints is not a list of heights and widths")
    return pinpoints
