from functools import cache
from typing import Any

import pytest
import transformers as untyped_transformers

from tests.integration.families.harness import tokenizer, without_video
from tests.unit.families.kit import image, model_files, random_sizes
from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import Modality
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders, count_tokens
from triptych.families.internvl import InternVl
from triptych.families.model_files import BadModel, ModelFiles

transformers: Any = untyped_transformers
TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
CONFIG: dict[str, Any] = {
    "model_type": "internvl",
    "image_token_id": 151667,
    "text_config": {"model_type": "qwen2", "hidden_size": 896},
    "vision_config": {"model_type": "internvl_vision", "image_size": [448, 448], "patch_size": [14, 14]},
}
IMAGES: dict[str, Any] = {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12}


def published(
    *, processor: dict[str, Any] | None = None, images: dict[str, Any] | None = None, **config: Any
) -> ModelFiles:
    return model_files(
        config=CONFIG | config,
        processor={"image_seq_length": 256} | (processor or {}),
        image_processor=IMAGES | (images or {}),
        tokenizer_config={"extra_special_tokens": TOKENS},
    )


@cache
def processor_of_transformers(max_tiles: int) -> Any:
    images = transformers.GotOcr2ImageProcessorPil(**(IMAGES | {"max_patches": max_tiles}))
    return without_video(transformers.InternVLProcessor)(images, tokenizer(named=TOKENS), None, image_seq_length=256)


@pytest.mark.parametrize("max_tiles", [1, 6, 12])
def test_counts_equal_those_of_transformers(max_tiles: int) -> None:
    family = InternVl.load(published(images={"max_patches": max_tiles}))
    sizes = [*random_sizes(6000), (448, 448), (896, 448)]
    processor = processor_of_transformers(max_tiles)
    counted = processor._get_num_multimodal_tokens(image_sizes=[(height, width) for width, height in sizes])
    # Without the begin and end tokens.
    assert [count_tokens(family, image(*size)) for size in sizes] == [tokens - 2 for tokens in counted.num_image_tokens]


def test_an_image_is_between_its_begin_and_end_tokens() -> None:
    family = InternVl.load(published())
    assert family.prompt_replacement(image(448, 448)) == ("<img>", Placeholders(151667, 256), "</img>")
    assert family.outputs(image(896, 448), DType.BF16) == (TensorSpec("embeds", DType.BF16, (3 * 256, 896)),)
    assert (family.hidden_size, family.context_length) == (896, 32768)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (published(processor={"image_seq_length": 64}), "image_seq_length is 64, the vision encoder makes 256 rows"),
        (
            published(images={"size": {"height": 384, "width": 384}}),
            "tiles of 384 pixels, the vision encoder takes 448",
        ),
        (published(images={"size": {"height": 448, "width": 384}}), "not a square"),
        (published(vision_config={"model_type": "pixtral"}), "vision_config.model_type is 'pixtral'"),
        (published(vision_feature_select_strategy="full"), "vision_feature_select_strategy is 'full'"),
        (published(images={"max_patches": 0}), "max_patches is 0"),
        (published(images={"max_patches": 1 << 30}), "max_patches is 1073741824, more than 256"),
        (model_files(config=CONFIG, image_processor=IMAGES), "names no start_image_token"),
    ],
)
def test_contradictory_configurations_are_refused(model: ModelFiles, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        InternVl.load(model)


def test_other_media_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="the model takes images, not audio"):
        InternVl.load(published()).prompt_replacement(image(9, 9, Modality.AUDIO))
