from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.mllama import image_processing_pil_mllama as reference

from tests.examples import examples
from tests.unit.families.kit import clip, image, model_files
from triptych.domain.embedding import DType, TensorSpec
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders, count_tokens
from triptych.families.mllama import Mllama, arrangements
from triptych.families.model_files import BadModel, ModelFiles

_processor: Any = reference.MllamaImageProcessorPil
_canvas: Any = reference.get_optimal_tiled_canvas
IMAGE_ID = 128_256


def files(vision: dict[str, Any] | None = None, image_processor: dict[str, Any] | None = None) -> ModelFiles:
    """The files of Llama 3.2 11B Vision."""
    return model_files(
        config={
            "model_type": "mllama",
            "image_token_index": IMAGE_ID,
            "text_config": {"model_type": "mllama_text_model"},
            "vision_config": {"model_type": "mllama_vision_model", "image_size": 560} | (vision or {}),
        },
        image_processor={"size": {"height": 560, "width": 560}, "max_image_tiles": 4} | (image_processor or {}),
    )


SMALL = {"image_size": 28, "patch_size": 14}, {"size": {"height": 28, "width": 28}}


def test_published_files() -> None:
    family = Mllama.load(files())
    assert family.placeholder_ids == {IMAGE_ID}
    assert family.prompt_replacement(image(1000, 700)) == (Placeholders(IMAGE_ID, 1),)
    assert family.outputs(image(1000, 700), DType.BF16) == (
        TensorSpec("tiles", DType.BF16, (4, 1601, 4096)),
        TensorSpec("padding", DType.BF16, (0, 1601, 4096)),
    )
    assert [tensor.shape[0] for tensor in family.outputs(image(300, 900), DType.F32)] == [2, 2]
    assert (family.hidden_size, family.context_length) == (4096, 131_072)


SIDES = st.integers(1, 6000)


@pytest.mark.slow
@settings(max_examples=examples(1000), deadline=None)
@given(SIDES, SIDES)
@example(560, 560)
@example(1, 6000)
@example(1120, 560)
def test_tiles_equal_those_of_the_processor(width: int, height: int) -> None:
    rows, columns = (int(side) // 560 for side in _canvas(height, width, 4, 560))
    assert Mllama.load(files()).tiles(width, height) == rows * columns


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 5))
def test_tiles_equal_the_processors_output(width: int, height: int, most: int) -> None:
    ratios = [list(ratio) for ratio in arrangements(most)]
    vision = SMALL[0] | {"max_num_tiles": most, "supported_aspect_ratios": ratios}
    family = Mllama.load(files(vision, SMALL[1] | {"max_image_tiles": most}))
    made = _processor(size={"height": 28, "width": 28}, max_image_tiles=most)(Image.new("RGB", (width, height)))
    assert count_tokens(family, image(width, height)) == 1
    tiles, padding = family.outputs(image(width, height), DType.F32)
    assert tiles.shape[0] == made["num_tiles"][0][0]
    assert tiles.shape[0] + padding.shape[0] == most
    assert tiles.shape[1] == 5


def test_aspect_ratio_ids_equal_those_of_the_processor() -> None:
    assert all(arrangements(most) == reference.get_all_supported_aspect_ratios(most) for most in range(1, 9))


@pytest.mark.parametrize(
    ("vision", "image_processor", "named"),
    [
        ({"image_size": 448}, {}, "image_size"),
        ({"max_num_tiles": 2}, {}, "max_image_tiles"),
        ({}, {"size": {"shortest_edge": 560}}, "size"),
        ({"supported_aspect_ratios": [[1, 1]]}, {}, "supported_aspect_ratios"),
        ({"patch_size": 0}, {}, "patch_size"),
        ({"max_num_tiles": 1 << 30}, {}, "max_num_tiles is 1073741824, more than 256"),
    ],
)
def test_contradictory_configurations_are_refused(
    vision: dict[str, Any], image_processor: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadModel, match=named):
        Mllama.load(files(vision, image_processor))


def test_other_media_are_refused() -> None:
    family = Mllama.load(files())
    with pytest.raises(InvalidMedia, match="images"):
        family.prompt_replacement(clip(16_000))
    with pytest.raises(InvalidMedia, match="images"):
        family.outputs(clip(16_000), DType.F32)
