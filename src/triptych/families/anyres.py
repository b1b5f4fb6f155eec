"""AnyRes images of LLaVA-NeXT and LLaVA-OneVision: the whole image, and a grid of tiles without its padding.

The arithmetic follows transformers step by step, as another order of rounding gives other counts.

The vision encoder computes each tile by itself. The tiles' embeddings are then joined line by line over the grid's full
width. So an image can be split between lines, and a shard needs the rows of tiles that its lines come from.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import floor, sqrt
from typing import Self

from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.families.base import Placeholders, PromptReplacement, refuse_unless
from triptych.families.fields import integer, square
from triptych.families.model_files import BadModel, Json, ModelFiles
from triptych.families.plain import Plain

Pinpoints = tuple[tuple[int, int], ...]
"""Heights and widths, in pixels, that an image may be fitted into."""

_SCALED_DOWN_FROM = 1.1
"""Lines are downscaled only if their sides exceed the limit by this factor."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of embeddings made from an image's tiles, each of ``width`` embeddings and a newline. ``top`` lines of
    padding precede the ``shown`` ones, which are interpolated to ``count``. A tile is ``side`` lines high.
    """

    side: int
    top: int
    shown: int
    count: int
    width: int

    def scaled_down(self, tiles: int) -> Self:
        """Downscale to at most about as many embeddings as ``tiles`` tiles have."""
        ratio = sqrt(self.shown * self.width / (tiles * self.side**2))
        if ratio <= _SCALED_DOWN_FROM:
            return self
        return replace(self, count=int(self.shown // ratio), width=int(self.width // ratio))

    @property
    def tokens(self) -> int:
        return self.count * (self.width + 1)

    @property
    def per_row(self) -> tuple[int, ...]:
        """The number of lines that start in each row of tiles; rows without one are left out."""
        lines = range(self.count)
        rows = range((self.top + self.shown) // self.side + 1)
        ends = [bisect_right(lines, row, key=lambda line: self._rows(line)[0]) for row in rows]
        return tuple(end - begin for begin, end in pairwise((0, *ends)) if end > begin)

    def rows(self, first: int, count: int) -> range:
        """The rows of tiles that these adjacent lines are interpolated from."""
        return range(self._rows(first)[0], self._rows(first + count - 1)[1] + 1) if count else range(0)

    def _rows(self, line: int) -> tuple[int, int]:
        """The rows of tiles of the first and last line that this one is interpolated from."""
        at = max(0.0, (line + 0.5) * self.shown / self.count - 0.5)
        first = floor(at)
        last = min(first + (at > first), self.shown - 1)
        return (self.top + first) // self.side, (self.top + last) // self.side


@dataclass(frozen=True, slots=True)
class Grid:
    """``tile_px`` is the side of a tile in pixels; the encoder turns it into ``side`` by ``side`` embeddings."""

    pinpoints: Pinpoints
    tile_px: int
    side: int

    def tiles(self, info: MediaInfo) -> tuple[int, int]:
        """Rows and columns of the best pinpoint: it keeps the most pixels, then wastes the least."""

        def fit(pinpoint: tuple[int, int]) -> tuple[int, int]:
            height, width = pinpoint
            scale = min(width / info.width, height / info.height)
            covered = min(int(info.width * scale) * int(info.height * scale), info.width * info.height)
            return covered, covered - width * height

        height, width = max(self.pinpoints, key=fit)
        return height // self.tile_px, width // self.tile_px

    def lines(self, info: MediaInfo) -> Lines:
        """The lines of the tiles, without padding."""
        rows, columns = self.tiles(info)
        height, width = rows * self.side, columns * self.side
        if info.width / info.height > width / height:
            top = (height - int(round(info.height * (width / info.width), 7))) // 2
            return Lines(self.side, top, height - 2 * top, height - 2 * top, width)
        left = (width - int(round(info.width * (height / info.height), 7))) // 2
        return Lines(self.side, 0, height, height, width - 2 * left)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an image for one shard: its tiles, of ``of`` (the first is the whole image), and its range of rows."""

    tiles: tuple[int, ...]
    of: int
    rows: range


@dataclass(frozen=True, slots=True)
class AnyRes(Plain, ABC):
    """The whole image, then its tiles line by line."""

    grid: Grid

    @abstractmethod
    def lines(self, info: MediaInfo) -> Lines | None:
        """The lines of the tiles; None if the image is encoded only as a whole, with one newline."""
        ...

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        refuse_unless(info, Modality.IMAGE)
        lines = self.lines(info)
        return (Placeholders(self.placeholder_id, self.grid.side**2 + (1 if lines is None else lines.tokens)),)

    def units(self, info: MediaInfo) -> tuple[int, ...]:
        """Units of an image: one for the whole image, and one per row of tiles with the lines that start in it. Raises
        InvalidMedia.
        """
        refuse_unless(info, Modality.IMAGE)
        lines = self.lines(info)
        if lines is None:
            return (self.grid.side**2 + 1,)
        return (self.grid.side**2, *(count * (lines.width + 1) for count in lines.per_row))

    def part(self, info: MediaInfo, shard: Shard) -> Part:
        """The part for one shard of ``units``."""
        units = self.units(info)
        begin = sum(units[: shard.first])
        rows_made = range(begin, begin + sum(units[shard.first : shard.first + shard.count]))
        lines = self.lines(info)
        if lines is None:
            return Part((0,), 1, rows_made)
        before, per_row = max(shard.first - 1, 0), lines.per_row
        rows_here = per_row[before : shard.first + shard.count - 1]
        rows, columns = self.grid.tiles(info)
        needed = lines.rows(sum(per_row[:before]), sum(rows_here))
        tiles = range(1 + needed.start * columns, 1 + needed.stop * columns)
        return Part((*(() if shard.first else (0,)), *tiles), 1 + rows * columns, rows_made)


def load_grid(files: ModelFiles, vision: Json, defaults: Sequence[Sequence[int]], processor: Json) -> Grid:
    """``defaults`` are the family's pinpoints; ``processor`` is its image processor with defaults. Raises BadModel."""
    if not processor["do_resize"]:
        raise BadModel("do_resize of the image processor is false: tiles would have no common size")
    tile_px = square(processor, "crop_size" if processor["do_center_crop"] else "size")
    encoder = square(vision, "image_size")
    pinpoints = _pinpoints(files.config, defaults)
    if tile_px != encoder or _pinpoints(files.image_processor, defaults) != pinpoints:
        raise BadModel(
            f"the image processor makes tiles of {tile_px} pixels, the vision encoder takes {encoder}: they and the "
            "image_grid_pinpoints of the image processor and of config.json must agree"
        )
    if any(side % encoder for pinpoint in pinpoints for side in pinpoint):
        raise BadModel(f"image_grid_pinpoints are no multiples of the vision encoder's {encoder} pixels")
    return Grid(pinpoints, encoder, encoder // integer(vision, "patch_size"))


def _pinpoints(config: Json, defaults: Sequence[Sequence[int]]) -> Pinpoints:
    given = config.get("image_grid_pinpoints") or defaults
    try:
        pinpoints = tuple((int(height), int(width)) for height, width in given)
    except (TypeError, ValueError):
        pinpoints = ()
    if not pinpoints or any(side < 1 for pinpoint in pinpoints for side in pinpoint):
        raise BadModel("image_grid_pinpoints is not a list of heights and widths")
    return pinpoints
