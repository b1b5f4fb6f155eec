from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia
from triptych.families.base import count_tokens
from triptych.families.llava import Llava
from triptych.families.model_files import BadModel, ModelFiles

_processor: Any = LlavaProcessor  # transformers leaves these untyped
_fast_tokenizer: Any = PreTrainedTokenizerFast
IMAGE_ID = 1


def files(
    *,
    config: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
    image_processor: dict[str, Any] | None = None,
) -> ModelFiles:
    """The files of LLaVA 1.5 at a tiny size."""
    return ModelFiles(
        directory=Path(),
        config={
            "model_type": "llava",
            "image_token_index": IMAGE_ID,
            "vision_feature_select_strategy": "default",
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096},
            "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14} | (vision or {}),
        }
        | (config or {}),
        processor={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        | (processor or {}),
        image_processor={
            "do_center_crop": True,
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        }
        | (image_processor or {}),
        tokenizer_config={},
        generation_config={},
        chat_template=None,
    )


def info(width: int = 40, height: int = 30, modality: Modality = Modality.IMAGE) -> MediaInfo:
    return MediaInfo(modality, "png", width, height, 1, bytes(32))


def count_of_transformers(model: ModelFiles, width: int, height: int) -> int:
    tokenizer = _fast_tokenizer(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    processor = _processor(CLIPImageProcessorPil(**model.image_processor), tokenizer, **model.processor)
    pixels = Image.fromarray(np.zeros((height, width, 3), np.uint8))
    ids = processor(text="<image>", images=pixels)["input_ids"][0]
    return int(np.sum(np.asarray(ids) == IMAGE_ID))


VARIANTS = {
    "cropped, class token dropped": files(),
    "resized to a square": files(image_processor={"do_center_crop": False, "size": {"height": 28, "width": 28}}),
    "class token kept": files(
        config={"vision_feature_select_strategy": "full"}, processor={"vision_feature_select_strategy": "full"}
    ),
    "an encoder without a class token": files(
        config={"vision_feature_select_strategy": "full"},
        vision={"model_type": "siglip_vision_model", "patch_size": 7},
        processor={"vision_feature_select_strategy": "full", "num_additional_image_tokens": 0, "patch_size": 7},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
@settings(max_examples=15)
def test_counts_equal_those_of_transformers(variant: str, width: int, height: int) -> None:
    model = VARIANTS[variant]
    family = Llava.load(model)
    assert count_tokens(family, info(width, height)) == count_of_transformers(model, width, height)


def test_missing_values_of_published_files_have_defaults() -> None:
    family = Llava.load(files())
    assert (family.placeholder_id, family.hidden_size, family.context_length) == (IMAGE_ID, 4096, 4096)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (files(vision={"image_size": 56}), "makes 28 x 28 images of 4 tokens, the vision encoder takes 56 x 56"),
        (files(processor={"num_additional_image_tokens": 0}), "of 3 tokens, .* makes 4"),
        (files(processor={"patch_size": 7}), "of 16 tokens"),
        (files(vision={"model_type": "pixtral"}), "vision_config.model_type is 'pixtral'"),
        (files(image_processor={"do_center_crop": False}), "size is {'shortest_edge': 28}"),
        (files(image_processor={"do_center_crop": False, "do_resize": False}), "neither resizes nor crops"),
        (files(config={"vision_feature_select_strategy": "some"}), "vision_feature_select_strategy is 'some'"),
        (files(config={"image_token_index": None}), "has no image_token_id"),
        (files(config={"image_token_index": "1"}), "image_token_index is '1', not a positive integer"),
        (files(config={"text_config": None}), "has no text_config"),
        (files(config={"text_config": {"model_type": "unheard-of"}}), "has no hidden_size"),
    ],
)
def test_contradictory_configurations_are_refused(model: ModelFiles, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        Llava.load(model)


def test_other_media_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="the model takes images, not video"):
        Llava.load(files()).prompt_replacement(info(modality=Modality.VIDEO))


def test_the_embedding_has_a_row_for_each_position() -> None:
    family = Llava.load(files())
    tokens = count_tokens(family, info())
    assert family.outputs(info(), DType.F16) == (TensorSpec("embeds", DType.F16, (tokens, 4096)),)
