"""The Qwen adapters: pixels of videos, rotary positions, and refused prompts."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as untyped_transformers
from torch import nn

from tests.unit.engine.rope_index import RopeIndex, whole_seconds_only, with_parts_of_seconds
from tests.unit.families.video_processors import video_processor
from triptych.domain.embedding import DType
from triptych.domain.media import MediaInfo, Modality
from triptych.engine.families.adapters import PlacedItem
from triptych.engine.families.qwen_vl import QwenDecoder, QwenEncoder
from triptych.engine.media.item import LocalItem
from triptych.engine.media.videos import decode_video
from triptych.errors import InvalidMedia, InvalidRequest
from triptych.families.base import Placeholders
from triptych.families.model_files import ModelFiles
from triptych.families.qwen_vision import ROTARY
from triptych.families.registry import written_family
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing import clips, media

transformers: Any = untyped_transformers

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CLASSES = {
    "qwen2_vl": transformers.Qwen2VLModel,
    "qwen2_5_vl": transformers.Qwen2_5_VLModel,
    "qwen3_vl": transformers.Qwen3VLModel,
}
TEXT_ID = 7
PIXELS = {"size": {"shortest_edge": 4096, "longest_edge": 65536}}


def checkpoint(model_type: str) -> Any:
    side = 16 if model_type == "qwen3_vl" else 14
    vision = {"hidden_size": 8, "out_hidden_size": 8, "patch_size": side, "deepstack_visual_indexes": [0]}
    files = ModelFiles(
        directory=Path(),
        config={
            "model_type": model_type,
            "vision_config": vision | {"tokens_per_second": 3},
            "text_config": {"hidden_size": 8},
        },
        processor={},
        image_processor={"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": side, **PIXELS},
        tokenizer_config={},
        generation_config={},
        chat_template=None,
        video_processor={"patch_size": side, **PIXELS},
    )
    return SimpleNamespace(files=files, family=written_family(files))


def encoder(model_type: str) -> QwenEncoder:
    model: Any = SimpleNamespace()
    return QwenEncoder(model, checkpoint(model_type))


def text(model_type: str) -> QwenDecoder:
    language = SimpleNamespace(config=transformers.Qwen2Config())
    model: Any = SimpleNamespace(dtype=torch.float32, language_model=language)
    return QwenDecoder(model, checkpoint(model_type))


def inspected(data: bytes) -> tuple[bytes, MediaInfo]:
    return data, inspect_media(data, MediaLimits())


ITEMS = (
    inspected(media.png(90, 40)),
    inspected(clips.video(90, 64, frames=23, frames_per_s=8)),
    inspected(clips.video(64, 64, frames=40, frames_per_s=5, seed=1)),
    inspected(media.png(33, 120)),
    inspected(clips.video(120, 34, frames=5, frames_per_s=12, seed=2)),
)


def placed(adapter: Any, model_type: str) -> tuple[list[int], list[PlacedItem]]:
    """A prompt with texts of many lengths around all items, and the encoder's tensors except the embeddings."""
    family = checkpoint(model_type).family
    tokens, items = [TEXT_ID], []
    for number, (data, info) in enumerate(ITEMS):
        filled: list[int] = []
        for part in family.prompt_replacement(info):
            if isinstance(part, Placeholders):
                filled += range(len(tokens), len(tokens) + part.count)
            tokens += [part.token_id] * part.count if isinstance(part, Placeholders) else [TEXT_ID] * len(part)
        tokens += [TEXT_ID] * (number + 1)
        rotary = adapter.prepare(LocalItem(data, info))[ROTARY]
        specs = family.tensors(len(filled), DType.F32)
        tensors = {spec.name: torch.zeros(spec.shape) for spec in specs} | {ROTARY: rotary}
        items.append(PlacedItem(tuple(filled), tensors))
    return tokens, items


def of_transformers(model_type: str, token_ids: Sequence[int]) -> tuple[torch.Tensor, int]:
    """[3, tokens] of rotary positions, and that of the first generated token."""
    made = checkpoint(model_type)
    family, cls = made.family, CLASSES[model_type]
    merge, per_second = 2, 3
    vision = {"spatial_merge_size": merge, "tokens_per_second": per_second}
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(**vision)),
        get_vision_position_ids=partial(cls.get_vision_position_ids, None),
    )
    videos = [info for _, info in ITEMS if info.modality is Modality.VIDEO]
    kinds = {family.language.image_id: 1, family.language.video_id: 2}
    given: dict[str, Any] = {
        "image_grid_thw": torch.tensor([family.grid(info) for _, info in ITEMS if info.modality is Modality.IMAGE]),
        "video_grid_thw": torch.tensor([family.grid(info) for info in videos]),
    }
    if model_type == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([family.patch_seconds(info) for info in videos])
    ids = torch.tensor([list(token_ids)])
    types = torch.tensor([[kinds.get(token, 0) for token in token_ids]])
    rope_index: RopeIndex = partial(cls.get_rope_index, model)
    if model_type == "qwen2_5_vl" and whole_seconds_only():
        rope_index = with_parts_of_seconds(rope_index, merge, per_second)
    positions, delta = rope_index(ids, mm_token_type_ids=types, **given)
    return positions[:, 0], len(token_ids) + int(delta)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_rotary_positions_are_those_of_transformers(model_type: str) -> None:
    tokens, items = placed(encoder(model_type), model_type)
    plan = text(model_type).plan(tokens, items[::-1])
    positions, following = of_transformers(model_type, tokens)
    assert plan.positions is not None
    assert torch.equal(plan.positions, positions)
    assert plan.next_position == following


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("item", [1, 2, 4])
def test_pixels_of_a_video_are_those_of_transformers(model_type: str, item: int) -> None:
    data, info = ITEMS[item]
    adapter = encoder(model_type)
    settings = checkpoint(model_type).files.video_processor
    name = "Qwen3VLVideoProcessor" if model_type == "qwen3_vl" else "Qwen2VLVideoProcessor"
    made = video_processor(name, fps=2.0, **settings)(
        np.stack(list(decode_video(data, info, range(info.frames)))),
        video_metadata=[{"total_num_frames": info.frames, "fps": info.frames / info.duration_s}],
        do_sample_frames=True,
        return_tensors="pt",
    )
    features = adapter.prepare(LocalItem(data, info))
    assert features["grid"].tolist() == made["video_grid_thw"][0].tolist()
    assert torch.allclose(features["pixel_values"], made["pixel_values_videos"], rtol=0, atol=1e-5)


def test_frames_of_a_video_are_resized_one_by_one() -> None:
    data, info = inspected(clips.video(640, 480, frames=60, frames_per_s=2))
    adapter = encoder("qwen2_vl")
    adapter.prepare(LocalItem(*ITEMS[1]))
    tracemalloc.start()
    features = adapter.prepare(LocalItem(data, info))
    most_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert features["grid"][0] == 30
    assert most_nbytes < 6 * 3 * info.pixels


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen2_5_vl", "Qwen2_5_VisionPatchEmbed"), ("qwen3_vl", "Qwen3VLVisionPatchEmbed")]
)
def test_patches_are_embedded_by_a_product_as_by_the_models_convolution(model_type: str, name: str) -> None:
    made = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    vision = SimpleNamespace(patch_size=14, temporal_patch_size=2, in_channels=3, hidden_size=8)
    convolution = getattr(made, name)(**({"config": vision} if model_type == "qwen3_vl" else {"embed_dim": 8}))
    model: Any = nn.Module()
    model.patch_embed = convolution
    QwenEncoder(model, checkpoint(model_type))
    patches = torch.rand(5, 3 * 2 * 14 * 14)
    embedded = model.patch_embed(patches)
    assert type(model.patch_embed.proj) is nn.Linear
    assert model.patch_embed.proj.weight.data_ptr() == convolution.proj.weight.data_ptr()
    assert torch.allclose(embedded, convolution(patches), rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", [True, False])
def test_deepstack_rows_are_split_in_either_layout(split: bool) -> None:
    """By items, or all in one as up to transformers 5.17."""
    adapter = encoder("qwen3_vl")
    features = [adapter.prepare(LocalItem(data, info)) for data, info in (ITEMS[0], ITEMS[3])]
    counts = [len(feature[ROTARY]) for feature in features]
    layer = torch.rand(sum(counts), 8)
    made = SimpleNamespace(
        pooler_output=torch.split(torch.rand(sum(counts), 8), counts),
        deepstack_features=[torch.split(layer, counts) if split else layer],
    )
    adapter._model = SimpleNamespace(
        device="cpu", dtype=torch.float32, get_image_features=lambda *args, **options: made
    )
    for (rows, rotary, stacked), wanted, count in zip(
        adapter.encode(features), torch.split(layer, counts), counts, strict=True
    ):
        assert len(rows) == len(rotary) == count
        assert torch.equal(stacked, wanted)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_video_settings_are_part_of_the_identity(model_type: str) -> None:
    assert encoder(model_type).settings["videos"]["fps"] == 2.0
    assert encoder(model_type).settings["videos"]["image_mean"]


def test_a_video_that_differs_from_its_header_is_refused() -> None:
    data, info = ITEMS[1]
    with pytest.raises(InvalidMedia):
        encoder("qwen2_vl").prepare(LocalItem(data, replace(info, frames=info.frames - 1)))
    with pytest.raises(InvalidMedia):
        encoder("qwen2_vl").prepare(LocalItem(data[: len(data) // 2], info))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_only_the_familys_tensors_are_accepted(model_type: str) -> None:
    adapter, family = text(model_type), checkpoint(model_type).family
    specs = family.tensors(6, DType.F32)
    assert adapter.accepts(6, specs)
    assert not adapter.accepts(6, specs[:-1])
    assert not adapter.accepts(5, specs)
    assert not adapter.accepts(6, family.tensors(6, DType.BF16))


@pytest.mark.parametrize("value", [-1, 99])
def test_impossible_rotary_positions_are_refused(value: int) -> None:
    tokens, items = placed(encoder("qwen2_vl"), "qwen2_vl")
    rotary = items[0].tensors[ROTARY].clone()
    rotary[0, 1] = value
    spoilt = replace(items[0], tensors={**items[0].tensors, ROTARY: rotary})
    with pytest.raises(InvalidRequest, match="rotary positions that none has"):
        text("qwen2_vl").plan(tokens, [spoilt, *items[1:]])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_prompt_without_items_needs_no_tensors(model_type: str) -> None:
    plan = text(model_type).plan([TEXT_ID] * 3, ())
    assert plan.positions is None
    assert not plan.rows
