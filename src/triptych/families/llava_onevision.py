"""LLaVA-OneVision: a single image is encoded as a whole and in tiles; several images of a request only as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from triptych.domain.media import MediaInfo
from triptych.families.anyres import AnyRes, Grid, Lines, load_grid
from triptych.families.defaults import TEXT_DEFAULTS, VISION_DEFAULTS
from triptych.families.fields import integer, section
from triptych.families.model_files import BadModel, Json, ModelFiles

_PINPOINTS = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
_DEFAULTS: Json = {
    "image_token_index": 151646,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
}
_PROCESSOR_DEFAULTS: Json = {"do_resize": True, "do_center_crop": False, "size": {"height": 384, "width": 384}}
_ANYRES = "anyres_max_"

WHOLE = ("tiles", "none")
"""The option of an image that is encoded only as a whole."""


@dataclass(frozen=True, slots=True)
class LlavaOneVision(AnyRes):
    """Tiles are downscaled to at most about ``max_tiles`` tiles' worth of embeddings."""

    max_tiles: int
    model_type: str = "llava_onevision"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        config = {**_DEFAULTS, **files.config}
        text = section(config, "text_config", "qwen2", TEXT_DEFAULTS)
        vision = section(config, "vision_config", "siglip_vision_model", VISION_DEFAULTS)
        processor = {**_PROCESSOR_DEFAULTS, **files.image_processor}
        grid = load_grid(files, vision, _PINPOINTS, processor)
        _check_rows(config, vision, files.processor, grid)
        return cls(
            placeholder_id=integer(config, "image_token_id", "image_token_index"),
            hidden_size=integer(text, "hidden_size"),
            context_length=integer(text, "max_position_embeddings"),
            grid=grid,
            max_tiles=_max_tiles(config, files.processor),
        )

    def together(self, infos: Sequence[MediaInfo]) -> tuple[MediaInfo, ...]:
        """Several images are encoded only as a whole, like transformers does with those of one conversation."""
        return tuple(infos) if len(infos) == 1 else tuple(replace(info, options=(WHOLE,)) for info in infos)

    def lines(self, info: MediaInfo) -> Lines | None:
        return None if WHOLE in info.options else self.grid.lines(info).scaled_down(self.max_tiles)


def _max_tiles(config: Json, processor: Json) -> int:
    ratio = config["vision_aspect_ratio"]
    number = ratio.removeprefix(_ANYRES) if isinstance(ratio, str) else ""
    if number == ratio or not number.isdecimal() or processor.get("vision_aspect_ratio", ratio) != ratio:
        raise BadModel(
            f"vision_aspect_ratio is {ratio!r} in config.json: it must be {_ANYRES} and a number, and the processor's must match"
        )
    return integer({"vision_aspect_ratio": int(number)}, "vision_aspect_ratio")


def _check_rows(config: Json, vision: Json, processor: Json, grid: Grid) -> None:
    """Check that processor and vision encoder agree on the rows per tile: one per patch."""
    encoder, strategy = vision["model_type"], config["vision_feature_select_strategy"]
    if encoder != "siglip_vision_model" or strategy != "full":
        raise BadModel(
            f"the vision encoder is {encoder!r} with vision_feature_select_strategy {strategy!r}; llava_onevision is served "
            "with siglip_vision_model and 'full'"
        )
    if processor.get("vision_feature_select_strategy", strategy) != strategy:
        raise BadModel("vision_feature_select_strategy of processor_config.json and config.json must agree")
    written = integer({"num_image_tokens": grid.side**2, **processor}, "num_image_tokens")
    if written != grid.side**2:
        raise BadModel(f"num_image_tokens is {written}, the vision encoder makes {grid.side**2} rows of a tile")
