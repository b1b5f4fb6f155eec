"""LLaVA-NeXT (LLaVA 1.6): the whole image, then a grid of tiles, each line of embeddings ending with a learned newline."""

from dataclasses import dataclass
from typing import Self

from triptych.domain.media import MediaInfo
from triptych.families.anyres import AnyRes, Grid, Lines, load_grid
from triptych.families.defaults import CLASS_TOKENS, CLIP_PROCESSOR_DEFAULTS, TEXT_DEFAULTS, VISION_DEFAULTS
from triptych.families.fields import integer, section
from triptych.families.model_files import BadModel, Json, ModelFiles

_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_DEFAULTS: Json = {"image_token_index": 32000, "vision_feature_select_strategy": "default"}


@dataclass(frozen=True, slots=True)
class LlavaNext(AnyRes):
    model_type: str = "llava_next"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        config = {**_DEFAULTS, **files.config}
        text = section(config, "text_config", "llama", TEXT_DEFAULTS)
        vision = section(config, "vision_config", "clip_vision_model", VISION_DEFAULTS)
        processor = {**CLIP_PROCESSOR_DEFAULTS, **files.image_processor}
        grid = load_grid(files, vision, _PINPOINTS, processor)
        _check_rows(config, vision, files.processor, grid)
        return cls(
            placeholder_id=integer(config, "image_token_id", "image_token_index"),
            hidden_size=integer(text, "hidden_size"),
            context_length=integer(text, "max_position_embeddings"),
            grid=grid,
        )

    def lines(self, info: MediaInfo) -> Lines:
        return self.grid.lines(info)


def _check_rows(config: Json, vision: Json, processor: Json, grid: Grid) -> None:
    """Check that processor and vision encoder agree on the rows per tile: one per patch."""
    encoder = vision["model_type"]
    if encoder not in CLASS_TOKENS:
        raise BadModel(f"vision_config.model_type is {encoder!r}; llava_next is served with {', '.join(CLASS_TOKENS)}")
    strategy = config["vision_feature_select_strategy"]
    if strategy not in ("default", "full"):
        raise BadModel(f"vision_feature_select_strategy is {strategy!r}, not 'default' or 'full'")
    tokens = grid.side**2 + CLASS_TOKENS[encoder] - (strategy == "default")
    patch = processor.get("patch_size") or vision["patch_size"]
    additional = processor.get("num_additional_image_tokens", 0 if processor else CLASS_TOKENS[encoder])
    dropped = (processor.get("vision_feature_select_strategy") or strategy) == "default"
    written = (grid.tile_px // patch) ** 2 + additional - dropped
    if not written == tokens == grid.side**2:
        raise BadModel(
            f"the processor writes {written} tokens for a tile, the vision encoder makes {tokens} rows of its {grid.side**2} "
            "patches: processor_config.json and config.json must agree"
        )
