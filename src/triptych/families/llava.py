"""LLaVA 1.5: every image is resized to one size and has the same number of positions."""

from dataclasses import dataclass
from typing import Self

from triptych.domain.media import MediaInfo, Modality
from triptych.families.base import Placeholders, PromptReplacement, refuse_unless
from triptych.families.defaults import CLASS_TOKENS, CLIP_PROCESSOR_DEFAULTS, TEXT_DEFAULTS, VISION_DEFAULTS
from triptych.families.fields import integer, section
from triptych.families.model_files import BadModel, Json, ModelFiles
from triptych.families.plain import Plain


@dataclass(frozen=True, slots=True)
class Llava(Plain):
    """``tokens_per_image`` is the same in the processor's prompt and the vision encoder's output."""

    tokens_per_image: int
    model_type: str = "llava"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        text = section(files.config, "text_config", "llama", TEXT_DEFAULTS)
        return cls(
            placeholder_id=integer(files.config, "image_token_id", "image_token_index"),
            hidden_size=integer(text, "hidden_size"),
            context_length=integer(text, "max_position_embeddings"),
            tokens_per_image=_tokens_per_image(files),
        )

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        refuse_unless(info, Modality.IMAGE)
        return (Placeholders(self.placeholder_id, self.tokens_per_image),)


def _tokens_per_image(files: ModelFiles) -> int:
    """Count like transformers' ``LlavaProcessor``, and check that the vision encoder agrees."""
    vision = section(files.config, "vision_config", "clip_vision_model", VISION_DEFAULTS)
    encoder = vision["model_type"]
    if encoder not in CLASS_TOKENS:
        raise BadModel(f"vision_config.model_type is {encoder!r}; llava is served with {', '.join(CLASS_TOKENS)}")
    patch_size = integer(vision, "patch_size")
    side = integer(vision, "image_size")
    strategy = files.config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise BadModel(f"vision_feature_select_strategy is {strategy!r}, not 'default' or 'full'")
    dropped = 1 if strategy == "default" else 0
    tokens = (side // patch_size) ** 2 + CLASS_TOKENS[encoder] - dropped

    height, width = _processed_size({**CLIP_PROCESSOR_DEFAULTS, **files.image_processor})
    processor_patch = files.processor.get("patch_size") or patch_size
    processor_strategy = files.processor.get("vision_feature_select_strategy") or strategy
    additional = files.processor.get("num_additional_image_tokens", CLASS_TOKENS[encoder] if not files.processor else 0)
    written = (height // processor_patch) * (width // processor_patch) + additional
    written -= 1 if processor_strategy == "default" else 0
    if written != tokens or (height, width) != (side, side):
        raise BadModel(
            f"the processor makes {height} x {width} images of {written} tokens, the vision encoder takes {side} x {side} "
            f"and makes {tokens}: processor_config.json, the image processor and config.json must agree"
        )
    return tokens


def _processed_size(image_processor: Json) -> tuple[int, int]:
    """Height and width, in pixels, of every processed image."""
    if image_processor["do_center_crop"]:
        size, name = image_processor["crop_size"], "crop_size"
    elif image_processor["do_resize"]:
        size, name = image_processor["size"], "size"
    else:
        raise BadModel("the image processor neither resizes nor crops: images would have no common size")
    if isinstance(size, int):
        return size, size
    if not isinstance(size, dict) or "height" not in size or "width" not in size:
        raise BadModel(f"the image processor's {name} is {size!r}: height and width are required")
    return integer(size, "height"), integer(size, "width")
