"""LLaVA-OneVision: counts depend on the image's size and on the number of images."""

from functools import cache
from typing import Any

import pytest
import transformers as untyped_transformers

from tests.integration.families.harness import tokenizer, without_video
from tests.unit.families.kit import image, model_files, random_sizes
from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import Modality
from triptych.errors import InvalidMedia
from triptych.families.base import as_in_request, count_tokens
from triptych.families.llava_onevision import LlavaOneVision
from triptych.families.model_files import BadModel, ModelFiles

transformers: Any = untyped_transformers
PROCESSOR: dict[str, Any] = {"num_image_tokens": 729, "vision_feature_select_strategy": "full"}
IMAGES: dict[str, Any] = {"size": {"height": 384, "width": 384}}


def published(
    *, processor: dict[str, Any] | None = None, images: dict[str, Any] | None = None, **config: Any
) -> ModelFiles:
    known = {
        "model_type": "llava_onevision",
        "image_token_index": 151646,
        "text_config": {"model_type": "qwen2", "hidden_size": 896},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
    }
    return model_files(
        config=known | config, processor=PROCESSOR | (processor or {}), image_processor=IMAGES | (images or {})
    )


@cache
def processor_of_transformers(anyres: str) -> Any:
    images = transformers.LlavaOnevisionImageProcessorPil(**IMAGES)
    cls = without_video(transformers.LlavaOnevisionProcessor)
    return cls(images, tokenizer("<image>", "<video>"), None, vision_aspect_ratio=anyres, **PROCESSOR)


@pytest.mark.parametrize("anyres", ["anyres_max_9", "anyres_max_4"])
def test_counts_of_one_image_equal_those_of_transformers(anyres: str) -> None:
    family = LlavaOneVision.load(published(vision_aspect_ratio=anyres, processor={"vision_aspect_ratio": anyres}))
    processor = processor_of_transformers(anyres)
    for width, height in (*random_sizes(6000), (384, 384)):
        (info,) = as_in_request(family, [image(width, height)])
        assert count_tokens(family, info) == processor._get_number_of_features(height, width, 384, 384)


def test_several_images_are_not_tiled() -> None:
    family = LlavaOneVision.load(published())
    infos = as_in_request(family, [image(900, 400), image(20, 20)])
    text = processor_of_transformers("anyres_max_9").replace_image_token({"batch_num_images": [2]}, 0)
    assert [count_tokens(family, info) for info in infos] == [text.count("<image>")] * 2
    assert family.outputs(infos[0], DType.F32) == (TensorSpec("embeds", DType.F32, (730, 896)),)
    assert all(info.options for info in infos)
    assert as_in_request(family, [image(900, 400)]) == (image(900, 400),)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            published(images={"size": {"height": 336, "width": 336}}),
            "tiles of 336 pixels, the vision encoder takes 384",
        ),
        (published(images={"image_grid_pinpoints": [[384, 384]]}), "image_grid_pinpoints .* must agree"),
        (published(processor={"num_image_tokens": 576}), "num_image_tokens is 576, the vision encoder makes 729"),
        (published(vision_aspect_ratio="square"), "vision_aspect_ratio is 'square'"),
        (published(processor={"vision_aspect_ratio": "anyres_max_4"}), "the processor's must match"),
        (published(vision_feature_select_strategy="default"), "served with siglip_vision_model and 'full'"),
        (published(processor={"vision_feature_select_strategy": "default"}), "must agree"),
        (published(images={"do_resize": False}), "do_resize .* is false"),
    ],
)
def test_contradictory_configurations_are_refused(model: ModelFiles, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        LlavaOneVision.load(model)


def test_other_media_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="the model takes images, not audio"):
        LlavaOneVision.load(published()).prompt_replacement(image(9, 9, Modality.AUDIO))
