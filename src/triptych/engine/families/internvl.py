"""InternVL: the tiles of an image, plus the whole image as one more tile."""

from collections.abc import Mapping
from typing import Any, ClassVar

from triptych.engine.families.tiles import TileEncoder


class InternVlEncoder(TileEncoder):
    options: ClassVar[Mapping[str, Any]] = {"crop_to_patches": True}
