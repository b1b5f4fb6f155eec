"""Gemma 3: every image has the same number of positions, with bidirectional attention, between blank lines."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Self

from triptych.domain.media import MediaInfo, Modality
from triptych.families.base import Placeholders, PromptReplacement, refuse_unless
from triptych.families.defaults import TEXT_DEFAULTS, VISION_DEFAULTS
from triptych.families.fields import integer, named_token, section, square
from triptych.families.model_files import BadModel, Json, ModelFiles
from triptych.families.plain import Plain

_DEFAULTS: Json = {
    "mm_tokens_per_image": 256,
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
    "image_token_index": 262_144,
}
_PROCESSOR_DEFAULTS: Json = {"size": {"height": 224, "width": 224}}


@dataclass(frozen=True, slots=True)
class Gemma3(Plain):
    """A chat template writes ``begin`` for an image. Pan-and-scan is off, like in transformers' processor."""

    begin_id: int
    begin: str
    end: str
    tokens_per_image: int
    model_type: str = "gemma3"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        config = {**_DEFAULTS, **files.config}
        text = section(config, "text_config", "gemma3_text", TEXT_DEFAULTS)
        return cls(
            placeholder_id=integer(config, "image_token_id", "image_token_index"),
            begin_id=integer(config, "boi_token_id", "boi_token_index"),
            begin=named_token(files, "boi_token", "<start_of_image>"),
            end=named_token(files, "eoi_token", "<end_of_image>"),
            hidden_size=integer(text, "hidden_size"),
            context_length=integer(text, "max_position_embeddings"),
            tokens_per_image=_tokens_per_image(config, files),
        )

    @property
    def replacement_targets(self) -> Mapping[Modality, tuple[int, ...]]:
        return {Modality.IMAGE: (self.begin_id,)}

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        refuse_unless(info, Modality.IMAGE)
        image = Placeholders(self.placeholder_id, self.tokens_per_image)
        return (f"\n\n{self.begin}", image, f"{self.end}\n\n")


def _tokens_per_image(config: Json, files: ModelFiles) -> int:
    vision = section(config, "vision_config", "siglip_vision_model", VISION_DEFAULTS)
    if vision["model_type"] != "siglip_vision_model":
        raise BadModel(
            f"vision_config.model_type is {vision['model_type']!r}; gemma3 is served with siglip_vision_model"
        )
    encoder, patches = square(vision, "image_size"), square(vision, "image_size") // square(vision, "patch_size")
    side = isqrt(integer(config, "mm_tokens_per_image"))
    tokens = (patches // (patches // side)) ** 2 if patches >= side else 0
    written = integer({"image_seq_length": 256, **files.processor}, "image_seq_length")
    size = square({**_PROCESSOR_DEFAULTS, **files.image_processor}, "size")
    if written != tokens or size != encoder:
        raise BadModel(
            f"the processor makes images of {size} pixels and writes {written} tokens, the vision encoder takes {encoder} pixels "
            f"and makes {tokens} rows: processor_config.json, the image processor and config.json must agree"
        )
    return tokens
