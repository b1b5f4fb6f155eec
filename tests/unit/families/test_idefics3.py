"""Idefics3 and SmolVLM: the image processor's tiles, computed from the size alone."""

import re
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import transformers as untyped_transformers
from PIL import Image

from tests.integration.families.harness import image_processor_class, tokenizer, without_video
from tests.unit.families.kit import image, model_files, random_sizes
from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import Modality
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders
from triptych.families.idefics3 import Idefics3
from triptych.families.model_files import BadModel, ModelFiles

transformers: Any = untyped_transformers
IMAGE_ID = 128257
# The published proportions at a fourteenth and a sixty-fourth of the size: real pixels are resized below.
SIZES: dict[str, dict[str, Any]] = {
    "idefics3": {"size": {"longest_edge": 104}, "max_image_size": {"longest_edge": 26}},
    "smolvlm": {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 8}},
}
TOWERS: dict[str, dict[str, Any]] = {
    "idefics3": {"model_type": "idefics3_vision", "image_size": 26, "patch_size": 1},
    "smolvlm": {"model_type": "smolvlm_vision", "image_size": 8, "patch_size": 1},
}
PER_TILE = {"idefics3": 169, "smolvlm": 4}


def published(
    name: str = "idefics3",
    *,
    processor: dict[str, Any] | None = None,
    images: dict[str, Any] | None = None,
    **config: Any,
) -> ModelFiles:
    known = {
        "model_type": name,
        "image_token_id": IMAGE_ID,
        "scale_factor": 2 if name == "idefics3" else 4,
        "text_config": {"model_type": "llama", "hidden_size": 576, "max_position_embeddings": 8192},
        "vision_config": TOWERS[name],
    }
    return model_files(
        config=known | config,
        processor={"image_seq_len": PER_TILE[name]} | (processor or {}),
        image_processor=SIZES[name] | (images or {}),
    )


@cache
def processor_of_transformers(name: str, splits: bool) -> Any:
    options = SIZES[name] | {"do_image_splitting": splits, "return_row_col_info": True}
    words = tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    if name == "idefics3":
        images = image_processor_class("Idefics3ImageProcessorPil")(**options)
        return transformers.Idefics3Processor(images, words, image_seq_len=PER_TILE[name])
    with patch("transformers.models.smolvlm.processing_smolvlm.num2words", str):
        images = image_processor_class("SmolVLMImageProcessorPil")(**options)
        cls = without_video(transformers.SmolVLMProcessor)
        return cls(images, words, None, image_seq_len=PER_TILE[name])


def written_by_transformers(name: str, splits: bool, width: int, height: int) -> str:
    processor = processor_of_transformers(name, splits)
    pixels = Image.fromarray(np.zeros((height, width, 3), np.uint8))
    tiles = processor.image_processor([[pixels]], do_rescale=False, do_normalize=False, do_pad=False)
    text: str = processor.replace_image_token(tiles, 0)
    return text


def written(family: Idefics3, width: int, height: int) -> str:
    parts = family.prompt_replacement(image(width, height))
    return "".join("<image>" * part.count if isinstance(part, Placeholders) else part for part in parts)


@pytest.mark.parametrize("name", SIZES)
def test_prompt_replacements_equal_those_of_transformers(name: str) -> None:
    family = Idefics3.load(published(name))
    for width, height in (*random_sizes(300), (26, 26), (8, 8)):
        assert written(family, width, height) == written_by_transformers(name, True, width, height)


@pytest.mark.parametrize("name", SIZES)
def test_an_unsplit_image_is_one_tile(name: str) -> None:
    family = Idefics3.load(published(name, images={"do_image_splitting": False}))
    assert written(family, 90, 30) == written_by_transformers(name, False, 90, 30)
    (spec,) = family.outputs(image(90, 30), DType.F32)
    assert spec == TensorSpec("embeds", DType.F32, (PER_TILE[name], 576))


def test_there_is_a_row_for_every_position() -> None:
    family = Idefics3.load(published())
    text = written(family, 100, 60)
    assert len(re.findall("<image>", text)) == family.outputs(image(100, 60), DType.F16)[0].shape[0]
    assert "<row_2_col_4>" in text


def test_missing_values_of_published_files_have_defaults() -> None:
    vision = {"model_type": "idefics3_vision", "image_size": 364, "patch_size": 14}
    text = {"model_type": "llama", "hidden_size": 4096, "max_position_embeddings": 10240}
    family = Idefics3.load(model_files(config={"model_type": "idefics3", "text_config": text, "vision_config": vision}))
    assert (family.placeholder_id, family.tokens_per_tile, family.longest_px) == (128257, 169, 1456)
    assert family.grid(image(1456, 1456)) == (4, 4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (published(processor={"image_seq_len": 64}), "image_seq_len is 64 .* makes 169 rows"),
        (
            published(images={"max_image_size": {"longest_edge": 52}}),
            "tiles have 52 pixels; the vision encoder takes 26",
        ),
        (published(images={"size": {"height": 9, "width": 9}}), "longest_edge is required"),
        (published(images={"do_resize": False}), "do_resize .* is false"),
        (published(text_config=None), "has no text_config"),
    ],
)
def test_contradictory_configurations_are_refused(model: ModelFiles, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        Idefics3.load(model)


def test_other_media_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="the model takes images, not video"):
        Idefics3.load(published()).prompt_replacement(image(9, 9, Modality.VIDEO))
