from functools import cache
from typing import Any

import pytest
import transformers as untyped_transformers

from tests.integration.families.harness import tokenizer
from tests.unit.families.kit import image, model_files, random_sizes
from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import Modality
from triptych.errors import InvalidMedia
from triptych.families.base import count_tokens
from triptych.families.llava_next import LlavaNext
from triptych.families.model_files import BadModel, ModelFiles

transformers: Any = untyped_transformers
PROCESSOR: dict[str, Any] = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
IMAGES: dict[str, Any] = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}


def published(
    *, processor: dict[str, Any] | None = None, images: dict[str, Any] | None = None, **config: Any
) -> ModelFiles:
    known = {
        "model_type": "llava_next",
        "image_token_index": 32000,
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
    }
    return model_files(
        config=known | config, processor=PROCESSOR | (processor or {}), image_processor=IMAGES | (images or {})
    )


@cache
def processor_of_transformers() -> Any:
    return transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessorPil(**IMAGES), tokenizer("<image>"), **PROCESSOR
    )


def test_counts_equal_those_of_transformers() -> None:
    family, processor = LlavaNext.load(published()), processor_of_transformers()
    for width, height in (*random_sizes(6000), (336, 336)):
        counted = processor._get_number_of_features(height, width, 336, 336) - 1  # the class token
        assert count_tokens(family, image(width, height)) == counted


def test_missing_values_of_published_files_have_defaults() -> None:
    family = LlavaNext.load(published())
    assert (family.hidden_size, family.context_length) == (4096, 131072)
    assert family.outputs(image(672, 672), DType.F16) == (TensorSpec("embeds", DType.F16, (576 + 48 * 49, 4096)),)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            published(images={"crop_size": {"height": 224, "width": 224}}),
            "tiles of 224 pixels, the vision encoder takes 336",
        ),
        (published(images={"image_grid_pinpoints": [[336, 336]]}), "image_grid_pinpoints .* must agree"),
        (published(image_grid_pinpoints=[[300, 300]], images={"image_grid_pinpoints": [[300, 300]]}), "no multiples"),
        (published(image_grid_pinpoints="all"), "not a list of heights and widths"),
        (published(processor={"num_additional_image_tokens": 0}), "writes 575 tokens for a tile"),
        (published(vision_feature_select_strategy="full"), "makes 577 rows"),
        (published(vision_feature_select_strategy="some"), "not 'default' or 'full'"),
        (published(vision_config={"model_type": "pixtral", "image_size": 336, "patch_size": 14}), "is 'pixtral'"),
        (published(images={"do_resize": False}), "do_resize .* is false"),
    ],
)
def test_contradictory_configurations_are_refused(model: ModelFiles, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        LlavaNext.load(model)


def test_other_media_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="the model takes images, not video"):
        LlavaNext.load(published()).prompt_replacement(image(9, 9, Modality.VIDEO))
