"""Items in vLLM's terms, and the models that its engines serve."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from tests.contract.text_engine_kit import checkpoint
from triptych.domain.embedding import EMBEDS, DType, Tensor, TensorSpec
from triptych.domain.engine import EmbeddingInput, EngineRequest
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.engine.tensors import domain_dtype, to_bytes
from triptych.errors import InvalidRequest
from triptych.families.model_files import BadModel
from triptych.integrations.vllm.families import check_pulled, check_served
from triptych.integrations.vllm.features import Features, FindFault, ItemForm, PlacedItem

WIDTH = 4
KEY = bytes(32)
ROWS = 3
CONFIG = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=3))


def rows(count: int, first: float = 0.0) -> torch.Tensor:
    """Rows whose values are their numbers."""
    return (first + torch.arange(count).float())[:, None].repeat(1, WIDTH)


def given(start: int, **tensors: torch.Tensor) -> EmbeddingInput:
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        made[name] = to_bytes(TensorSpec(name, domain_dtype(tensor.dtype), tuple(tensor.shape)), tensor)
    return EmbeddingInput(start, len(tensors[EMBEDS]), made, KEY)


def rotary(times: list[int], height: int, width: int) -> torch.Tensor:
    axes = (torch.tensor(times).int(), torch.arange(height).int(), torch.arange(width).int())
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


def place(
    item: EmbeddingInput, positions: list[int], *, layers: int = 0, find_fault: FindFault | None = None
) -> list[PlacedItem]:
    family: Any = SimpleNamespace(replacement_targets={Modality.IMAGE: (9,)})
    form = ItemForm(WIDTH, DType.F32, layers=layers)
    features = Features(form, family, CONFIG, largest_item=100, find_fault=find_fault)
    request = EngineRequest("r", tuple(range(200)), (item,), SamplingParams(max_tokens=1))
    return features.place(request, [positions])


def nothing(*_: object) -> str:
    return ""


def test_each_contiguous_run_of_rows_is_a_feature_with_these_rows() -> None:
    whole, *parts = (
        *place(given(5, embeds=rows(5)), [5, 6, 7, 8, 9]),
        *place(given(5, embeds=rows(5)), [5, 6, 9, 10, 12]),
    )
    assert whole.feature.identifier == KEY.hex()
    assert [(part.feature.mm_position.offset, part.feature.mm_position.length) for part in parts] == [
        (5, 2),
        (9, 2),
        (12, 1),
    ]
    assert torch.equal(torch.cat([part.item.embedding for part in parts]), rows(5))
    assert len({item.feature.identifier for item in (whole, *parts)}) == 4
    assert all(item.feature.data is None and item.feature.modality == "image" for item in (whole, *parts))
    assert [part.item.embedding.untyped_storage().nbytes() for part in parts] == [32, 32, 16]


def test_rows_for_layers_follow_in_the_last_dimension() -> None:
    item = given(0, embeds=rows(2), deepstack_0=rows(2, 10), deepstack_1=rows(2, 20))
    (placed,) = place(item, [0, 1], layers=2)
    assert placed.item.embedding.shape == (2, 3 * WIDTH)
    assert placed.item.embedding[1, ::WIDTH].tolist() == [1, 11, 21]


def test_small_tensors_beside_rows_are_the_fields_of_a_model_with_rotary_axes() -> None:
    item = given(0, embeds=rows(4), image_grid_thw=torch.tensor([[1, 4, 4]], dtype=torch.int32))
    (placed,) = place(item, [0, 1, 2, 3], find_fault=nothing)
    assert placed.feature.data is not None
    assert placed.feature.data["image_grid_thw"].data.tolist() == [1, 4, 4]
    assert place(item, [0, 1, 2, 3])[0].feature.data is None, "other models need none"


def test_an_image_has_the_grid_of_its_rotary_positions() -> None:
    (placed,) = place(given(0, embeds=rows(6), rotary=rotary([0], 2, 3)), [*range(6)], find_fault=nothing)
    assert placed.feature.modality == "image"
    assert placed.feature.data is not None
    assert placed.feature.data["image_grid_thw"].data.tolist() == [1, 4, 6]


@pytest.mark.parametrize("times", [[0, 1, 2, 3], [0, 1, 3, 4, 6], [0, 7], [0, 0, 0, 1]])
def test_a_video_has_seconds_that_give_its_times(times: list[int]) -> None:
    count = len(times) * 6
    (placed,) = place(given(0, embeds=rows(count), rotary=rotary(times, 2, 3)), [*range(count)], find_fault=nothing)
    assert placed.feature.modality == "video"
    fields = placed.feature.data
    assert fields is not None
    assert fields["video_grid_thw"].data.tolist() == [len(times), 4, 6]
    step = fields["second_per_grid_ts"].data.item() * CONFIG.vision_config.tokens_per_second
    assert [int(number * step) for number in range(len(times))] == times


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.7])
def test_text_after_a_video_of_more_times_than_columns_has_the_positions_of_vllm_by_itself(seconds: float) -> None:
    """It follows the last time, as in the model's own code. transformers 5 counts rows and columns only."""
    before, times = 2, [int(number * seconds * CONFIG.vision_config.tokens_per_second) for number in range(8)]
    count = len(times) * 6
    item = given(before, embeds=rows(count), rotary=rotary(times, 2, 3))
    (placed,) = place(item, [*range(before, before + count)], find_fault=nothing)
    fields = {"video_grid_thw": torch.tensor([len(times), 4, 6]), "second_per_grid_ts": torch.tensor(seconds)}
    data = {name: MultiModalFieldElem(data=field, field=MultiModalBatchedField()) for name, field in fields.items()}
    by_itself = replace(placed.feature, data=MultiModalKwargsItem(data))
    model: Any = SimpleNamespace(config=CONFIG)
    model.iter_mm_grid_thw = partial(Qwen2_5_VLForConditionalGeneration.iter_mm_grid_thw, model)
    found, expected = (
        Qwen2_5_VLForConditionalGeneration.get_mrope_input_positions(model, [0] * (before + count + 3), [feature])[0]
        for feature in (placed.feature, by_itself)
    )
    assert torch.equal(found, expected)
    assert found[:, -3].tolist() == [before + times[-1] + 1] * 3
    assert times[-1] > 3, "more than rows and columns"


def test_each_frame_between_texts_is_an_image() -> None:
    item = given(0, embeds=rows(8), rotary=rotary([0], 2, 2).repeat(2, 1))
    placed = place(item, [0, 1, 2, 3, 7, 8, 9, 10], find_fault=nothing)
    assert [part.feature.modality for part in placed] == ["image", "image"]


@pytest.mark.parametrize(
    "positions",
    [
        rotary([0], 2, 3)[[1, 0, 2, 3, 4, 5]],
        rotary([0], 2, 3) - 1,
        rotary([0], 2, 3) - 5,
        rotary([0, 3, 4], 2, 1),
        rotary([0, -5], 3, 1),
    ],
)
def test_rotary_positions_that_no_item_has_are_refused(positions: torch.Tensor) -> None:
    with pytest.raises(InvalidRequest, match="that none has"):
        place(given(0, embeds=rows(6), rotary=positions), [*range(6)], find_fault=nothing)


@pytest.mark.parametrize("grid", [[[1, 65534, 65534]], [[1, 4, 4], [1, -65534, 65534]], []])
def test_sizes_that_no_item_has_are_refused(grid: list[list[int]]) -> None:
    item = given(0, embeds=rows(4), image_grid_thw=torch.tensor(grid, dtype=torch.int32))
    with pytest.raises(InvalidRequest, match="an item has a size that none has"):
        place(item, [0, 1, 2, 3], find_fault=nothing)


def test_items_that_the_model_cannot_place_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="the model cannot place the prompt's items: KeyError"):
        place(given(0, embeds=rows(2)), [0, 1], find_fault=lambda *_: "KeyError")


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("embeds", DType.F32, (ROWS, WIDTH)),
        TensorSpec("deepstack_1", DType.F32, (ROWS, WIDTH + 100)),
        TensorSpec("rotary", DType.I32, (ROWS - 1, 3)),
        TensorSpec("image_grid_thw", DType.I32, (65,)),
    ],
)
def test_a_form_has_every_tensor_once_and_none_that_is_large(spec: TensorSpec) -> None:
    form = ItemForm(WIDTH, DType.F32, layers=1)
    known = [TensorSpec(name, DType.F32, (ROWS, WIDTH)) for name in ("embeds", "deepstack_0")]
    assert form.accepts(ROWS, known)
    assert not form.accepts(ROWS, known[:1])
    assert not form.accepts(ROWS + 1, known)
    assert not form.accepts(ROWS, [*known, spec])


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("granite_speech", "GraniteSpeechForConditionalGeneration", "LoRA"),
        ("mllama", "MllamaForConditionalGeneration", "has no model MllamaForConditionalGeneration"),
        ("voxtral", "VoxtralForConditionalGeneration", "Mistral's own files"),
        ("whisper", "WhisperForConditionalGeneration", "cross-attention"),
    ],
)
def test_other_models_are_refused_with_the_reason(model_type: str, architecture: str, reason: str) -> None:
    with pytest.raises(BadModel, match=f"engine vllm does not serve model_type '{model_type}': .*{reason}"):
        check_served(model_type, architecture)


@pytest.mark.parametrize(
    ("model_type", "architecture", "warns"),
    [
        ("lfm2_vl", "Lfm2VlForConditionalGeneration", True),
        ("gemma3", "Gemma3ForConditionalGeneration", False),
        ("cohere_compass", "CohereCompassForConditionalGeneration", False),
    ],
)
def test_a_model_that_is_not_tested_is_served_with_a_warning(
    model_type: str, architecture: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_served(model_type, architecture)
    assert (f"engine vllm is not tested with model_type '{model_type}'" in caplog.text) == warns


def test_a_vllm_that_runs_by_itself_pulls_items_of_tested_families_only() -> None:
    check_pulled(checkpoint().family)
    family: Any = SimpleNamespace(model_type="gemma3")
    with pytest.raises(BadModel, match=r"model_type 'gemma3'; it serves: llava, qwen2_5_vl, qwen3_vl$"):
        check_pulled(family)
