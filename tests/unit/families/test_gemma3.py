from functools import cache
from typing import Any

import numpy as np
import pytest
import transformers as untyped_transformers
from PIL import Image

from tests.integration.families.harness import tokenizer
from tests.unit.families.kit import image, model_files, random_sizes
from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import Modality
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders
from triptych.families.gemma3 import Gemma3
from triptych.families.model_files import BadModel, ModelFiles

transformers: Any = untyped_transformers
NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
IMAGES: dict[str, Any] = {"size": {"height": 896, "width": 896}, "do_pan_and_scan": None}


def published(
    *, processor: dict[str, Any] | None = None, images: dict[str, Any] | None = None, **config: Any
) -> ModelFiles:
    known = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
    }
    return model_files(
        config=known | config,
        processor={"image_seq_length": 256} | (processor or {}),
        image_processor=IMAGES | (images or {}),
        tokenizer_config=dict(NAMES),
    )


@cache
def processor_of_transformers() -> Any:
    images = transformers.Gemma3ImageProcessorPil(size={"height": 14, "width": 14}, do_pan_and_scan=True)
    return transformers.Gemma3Processor(images, tokenizer(named=NAMES), image_seq_length=256)


def test_prompt_replacements_equal_those_of_transformers() -> None:
    """A processor turns pan-and-scan off, whatever its image processor says."""
    family, processor = Gemma3.load(published()), processor_of_transformers()
    for width, height in random_sizes(300):
        pixels = Image.fromarray(np.zeros((height, width, 3), np.uint8))
        replacement = family.prompt_replacement(image(width, height))
        written = (
            NAMES["image_token"] * part.count if isinstance(part, Placeholders) else part for part in replacement
        )
        made = processor(text=[NAMES["boi_token"]], images=[[pixels]])["input_ids"][0]
        assert processor.tokenizer("".join(written))["input_ids"] == made


def test_missing_values_of_published_files_have_defaults() -> None:
    family = Gemma3.load(published())
    assert (family.begin_id, family.placeholder_id) == (255_999, 262_144)
    assert (family.hidden_size, family.context_length) == (2560, 131072)
    assert family.replacement_targets == {Modality.IMAGE: (255_999,)}
    assert family.outputs(image(9, 9), DType.BF16) == (TensorSpec("embeds", DType.BF16, (256, 2560)),)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (published(processor={"image_seq_length": 64}), "writes 64 tokens, .* makes 256 rows"),
        (published(images={"size": {"height": 448, "width": 448}}), "images of 448 pixels"),
        (published(mm_tokens_per_image=16), "writes 256 tokens, .* makes 16 rows"),
        (
            published(vision_config={"model_type": "clip_vision_model"}),
            "vision_config.model_type is 'clip_vision_model'",
        ),
    ],
)
def test_contradictory_configurations_are_refused(model: ModelFiles, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        Gemma3.load(model)


def test_other_media_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="the model takes images, not video"):
        Gemma3.load(published()).prompt_replacement(image(9, 9, Modality.VIDEO))
