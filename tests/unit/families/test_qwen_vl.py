"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: counts, prompt replacements and sampling equal transformers', from headers alone."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil, Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from tests.examples import examples
from tests.unit.families.video_processors import processed_size, sizing_processor
from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders, count_tokens, grid_of
from triptych.families.model_files import BadModel, Json, ModelFiles
from triptych.families.qwen2_vl import Qwen2VL
from triptych.families.qwen3_vl import Qwen3VL
from triptych.families.qwen_vision import Grid
from triptych.families.registry import written_family

_image_processor: Any = Qwen2VLImageProcessorPil  # transformers leaves these untyped
_processor3: Any = Qwen3VLProcessor
_metadata: Any = VideoMetadata

IMAGE_ID, VIDEO_ID = 151655, 151656


def files(
    model_type: str,
    *,
    config: Json | None = None,
    vision: Json | None = None,
    images: Json | None = None,
    videos: Json | None = None,
) -> ModelFiles:
    """The files of the smallest model of each family."""
    made, patch = {"qwen2_vl": ({"hidden_size": 1536}, 14), "qwen2_5_vl": ({"out_hidden_size": 1536}, 14)}.get(
        model_type, ({"out_hidden_size": 1536}, 16)
    )
    text = {"hidden_size": 1536, "max_position_embeddings": 32768}
    return ModelFiles(
        directory=Path(),
        config={
            "model_type": model_type,
            "vision_config": {**made, **(vision or {})},
            **({"text_config": text} if model_type == "qwen3_vl" else text),
            **(config or {}),
        },
        processor={},
        image_processor={"patch_size": patch, **(images or {})},
        tokenizer_config={},
        generation_config={},
        chat_template=None,
        video_processor={"patch_size": patch, **(videos or {})},
    )


VARIANTS: dict[str, ModelFiles] = {
    "qwen2_vl": files("qwen2_vl", images={"min_pixels": 3136, "max_pixels": 12845056}),
    "qwen2_vl, as is": files("qwen2_vl"),
    "qwen2_5_vl": files(
        "qwen2_5_vl",
        images={"size": {"shortest_edge": 3136, "longest_edge": 200704}},
        videos={"size": {"shortest_edge": 3136, "longest_edge": 100352}, "fps": 1.5, "max_frames": 40},
    ),
    "qwen2_5_vl, capped": files(
        "qwen2_5_vl", videos={"cap_pixels_per_frame": True, "max_video_tokens": 4000, "fps": 4, "num_frames": None}
    ),
    "qwen3_vl": files(
        "qwen3_vl",
        images={"size": {"longest_edge": 16777216, "shortest_edge": 65536}},
        videos={"size": {"longest_edge": 25165824, "shortest_edge": 4096}},
    ),
    "qwen3_vl, as is": files("qwen3_vl"),
    "qwen3_vl, capped": files(
        "qwen3_vl", videos={"cap_pixels_per_frame": True, "max_video_tokens": 90, "max_frames": 33}
    ),
}

sides = st.integers(1, 4000)
lengths = st.integers(2, 4000)
rates = st.sampled_from([0.5, 12, 24, 29.97, 60])
PUBLISHED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = {name: written_family(model) for name, model in VARIANTS.items()}


def family_of(name: str) -> Qwen2VL | Qwen3VL:
    family = FAMILIES[name]
    assert isinstance(family, Qwen2VL | Qwen3VL)
    return family


def image(width: int, height: int) -> MediaInfo:
    return MediaInfo(Modality.IMAGE, "png", width, height, 1, bytes(32))


def video(width: int, height: int, frames: int, fps: float = 30.0) -> MediaInfo:
    return MediaInfo(Modality.VIDEO, "mp4", width, height, 1, bytes(32), frames=frames, duration_s=frames / fps)


@cache
def image_processor(name: str) -> Any:
    """Each call makes its own class: transformers 5.17 writes ``min_pixels`` and ``max_pixels`` into the class's
    defaults.
    """
    own = type("OwnDefaults", (_image_processor,), {"size": dict(_image_processor.size)})
    return own(**VARIANTS[name].image_processor)


@cache
def video_processor(name: str) -> Any:
    """The processor of transformers, with the settings that it reads from the model's."""
    given = {key: value for key, value in VARIANTS[name].video_processor.items() if value is not None}
    if name.startswith("qwen3_vl"):
        return sizing_processor("Qwen3VLVideoProcessor", **given)
    return sizing_processor("Qwen2VLVideoProcessor", **{"fps": 2.0, **given})


def sampled_by_transformers(name: str, info: MediaInfo) -> list[int]:
    processor = video_processor(name)
    metadata = _metadata(total_num_frames=info.frames, fps=info.frames / info.duration_s)
    sampled = [int(index) for index in processor.sample_frames(metadata, fps=processor.fps)]
    if sampled[-1] >= info.frames:  # one step too far by rounding: transformers then fails to read that frame
        sampled.pop()
    return sampled


def check_image(name: str, width: int, height: int) -> None:
    family = family_of(name)
    try:
        patches = image_processor(name).get_number_of_image_patches(height, width)
    except ValueError:
        with pytest.raises(InvalidMedia, match="at most 200"):
            count_tokens(family, image(width, height))
    else:
        assert count_tokens(family, image(width, height)) == patches // 4


def check_video(name: str, width: int, height: int, frames: int, fps: float) -> None:
    family, info = family_of(name), video(width, height, frames, fps)
    sampled = sampled_by_transformers(name, info)
    assert list(family.sampled_frames(info)) == sampled
    try:
        size = processed_size(video_processor(name), len(sampled), height, width)
    except ValueError:
        with pytest.raises(InvalidMedia, match="at most 200"):
            count_tokens(family, info)
    else:
        rows, columns = (side // family.patches.side for side in size)
        assert family.grid(info) == Grid(-(-len(sampled) // 2), rows, columns)
        assert count_tokens(family, info) == -(-len(sampled) // 2) * rows * columns // 4


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
@given(width=sides, height=sides)
@settings(max_examples=examples(1000))
def test_images_have_as_many_tokens_as_in_transformers(name: str, width: int, height: int) -> None:
    check_image(name, width, height)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
@given(width=sides, height=sides, frames=lengths, fps=rates)
@settings(max_examples=examples(1000))
def test_videos_are_sampled_and_resized_as_in_transformers(
    name: str, width: int, height: int, frames: int, fps: float
) -> None:
    check_video(name, width, height, frames, fps)


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - PUBLISHED))
@given(width=sides, height=sides, frames=lengths, fps=rates)
@settings(max_examples=examples(100))
def test_other_settings_count_as_in_transformers(name: str, width: int, height: int, frames: int, fps: float) -> None:
    check_image(name, width, height)
    check_video(name, width, height, frames, fps)


@pytest.mark.parametrize("name", sorted(VARIANTS))
@given(width=st.integers(20, 90), height=st.integers(20, 90))
@settings(max_examples=5)
def test_patch_counts_equal_those_of_the_processor(name: str, width: int, height: int) -> None:
    made = image_processor(name)(images=Image.new("RGB", (width, height)), return_tensors="np")
    grid = family_of(name).grid(image(width, height))
    assert made["image_grid_thw"].tolist() == [list(grid)] == [list(grid_of(family_of(name), image(width, height)))]
    assert len(made["pixel_values"]) == grid.frames * grid.rows * grid.columns


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl, capped"])
@given(frames=st.integers(2, 900), fps=st.sampled_from([7.5, 25, 29.97]))
@settings(max_examples=examples(100))
def test_timestamps_in_a_prompt_equal_those_of_transformers(name: str, frames: int, fps: float) -> None:
    family, info = family_of(name), video(64, 48, frames, fps)
    grid = family.grid(info)
    processor = _processor3.__new__(_processor3)
    processor.video_token, processor.vision_start_token, processor.vision_end_token = (
        "#",
        "<|vision_start|>",
        "<|vision_end|>",
    )
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    metadata = _metadata(
        total_num_frames=frames, fps=frames / info.duration_s, frames_indices=list(family.sampled_frames(info))
    )
    written = processor.replace_video_token(
        {"video_grid_thw": np.array([list(grid)]), "video_metadata": [metadata]}, video_idx=0
    )
    replacement = family.prompt_replacement(info)
    assert "".join(part if isinstance(part, str) else "#" * part.count for part in replacement) == written
    assert {part.token_id for part in replacement if isinstance(part, Placeholders)} == {VIDEO_ID}


def test_seconds_between_patches_equal_those_of_transformers() -> None:
    """``second_per_grid_ts`` of Qwen2.5-VL's processor."""
    family = family_of("qwen2_5_vl")
    assert isinstance(family, Qwen2VL)
    for info in (video(64, 48, 100, 24), video(64, 48, 901, 29.97), video(64, 48, 3, 12.5)):
        rate = info.frames / info.duration_s
        metadata = _metadata(total_num_frames=info.frames, fps=rate, frames_indices=list(family.sampled_frames(info)))
        assert family.patch_seconds(info) == 2 / metadata.sampled_fps


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_an_item_is_one_run_of_its_placeholder(name: str) -> None:
    family = family_of(name)
    assert family.prompt_replacement(image(280, 140)) == (Placeholders(IMAGE_ID, 50),)
    assert family.prompt_replacement(video(280, 140, 60)) == (
        Placeholders(VIDEO_ID, count_tokens(family, video(280, 140, 60))),
    )
    assert family.replacement_targets == {Modality.IMAGE: (IMAGE_ID,), Modality.VIDEO: (VIDEO_ID,)}
    assert family.placeholder_ids == {IMAGE_ID, VIDEO_ID}


def test_the_tensors_of_an_embedding() -> None:
    info = image(280, 140)
    rows = (TensorSpec("embeds", DType.BF16, (50, 1536)), TensorSpec("rotary", DType.I32, (50, 3)))
    assert family_of("qwen2_vl").outputs(info, DType.BF16) == rows
    assert family_of("qwen2_5_vl").outputs(info, DType.BF16) == rows
    tokens = count_tokens(family_of("qwen3_vl"), info)
    assert family_of("qwen3_vl").outputs(info, DType.F32) == (
        TensorSpec("embeds", DType.F32, (tokens, 1536)),
        TensorSpec("rotary", DType.I32, (tokens, 3)),
        *(TensorSpec(f"deepstack_{layer}", DType.F32, (tokens, 1536)) for layer in range(3)),
    )


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_missing_values_of_published_files_have_defaults(model_type: str) -> None:
    wide = {"qwen2_vl": "hidden_size"}.get(model_type, "out_hidden_size")
    hidden = 4096 if model_type == "qwen3_vl" else 8192
    model = files(model_type, vision={wide: hidden})
    bare = {name: value for name, value in model.config.items() if name in ("model_type", "vision_config")}
    family = written_family(replace(model, config=bare))
    assert (family.model_type, family.hidden_size) == (model_type, hidden)
    assert family.context_length == (128000 if model_type == "qwen3_vl" else 32768)
    assert family.placeholder_ids == {IMAGE_ID, VIDEO_ID}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (files("qwen2_vl", vision={"hidden_size": 1280}), "embeddings of 1280, the language model takes 1536"),
        (files("qwen2_5_vl", vision={"out_hidden_size": 99}), "embeddings of 99, the language model takes 1536"),
        (
            files("qwen3_vl", images={"patch_size": 14}),
            "image processor's patch_size is 14, the vision encoder takes 16",
        ),
        (files("qwen3_vl", videos={"merge_size": 1}), "video processor's merge_size is 1, the vision encoder takes 2"),
        (files("qwen2_vl", vision={"temporal_patch_size": 1}), "temporal_patch_size is 2, the vision encoder takes 1"),
        (files("qwen2_vl", vision={"patch_size": "14"}), "patch_size is '14', not a positive integer"),
        (files("qwen2_vl", images={"do_resize": False}), "image processor's do_resize is false"),
        (files("qwen2_vl", images={"size": {"height": 28}}), "has no shortest_edge"),
        (files("qwen2_vl", images={"size": 28}), "size is 28"),
        (files("qwen2_vl", videos={"fps": 0}), "fps is 0, not a positive number"),
        (files("qwen2_vl", videos={"num_frames": 8}), "num_frames is not supported"),
        (files("qwen2_vl", videos={"max_frames": -1}), "max_frames is -1, not a positive integer"),
        (files("qwen3_vl", vision={"deepstack_visual_indexes": 3}), "deepstack_visual_indexes is 3, not a list"),
        (files("qwen2_5_vl", config={"image_token_id": "x"}), "image_token_id is 'x', not a positive integer"),
    ],
)
def test_contradictory_configurations_are_refused(model: ModelFiles, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        written_family(model)


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize(
    ("info", "message"),
    [
        (MediaInfo(Modality.AUDIO, "wav", 0, 0, 1, bytes(32)), "the model takes images and videos, not audio"),
        (image(4020, 20), r"the longer side is 201\.0 times the shorter one, the model takes at most 200"),
        (video(4, 900, 60), r"the longer side is 225\.0 times the shorter one, the model takes at most 200"),
        (video(64, 64, 1), "a video of 1 frames is too short: the model takes 2 at least"),
        (replace(video(64, 64, 9), duration_s=0.0), "header says 9 frames in 0.0 s"),
        (replace(video(64, 64, 9), duration_s=float("nan")), "header says 9 frames in nan s"),
        (replace(video(64, 64, 9), frames=0), "header says 0 frames"),
        (image(0, 0), "an item of 0x0 has no pixels"),
    ],
)
def test_images_that_the_processor_refuses_are_refused(name: str, info: MediaInfo, message: str) -> None:
    with pytest.raises(InvalidMedia, match=message):
        family_of(name).prompt_replacement(info)
    with pytest.raises(InvalidMedia, match=message):
        family_of(name).outputs(info, DType.F32)


def test_an_extreme_duration_is_a_long_video() -> None:
    for name in VARIANTS:
        info = replace(video(64, 64, 2000), duration_s=1e308)
        assert len(family_of(name).sampled_frames(info)) <= 768
