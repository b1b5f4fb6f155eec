"""Families that enter a text engine of vLLM, and how."""

import logging
from typing import Any

import pytest

from triptych.domain.embedding import EMBEDS, DType, TensorSpec
from triptych.families.gemma3 import Gemma3
from triptych.families.model_files import BadModel
from triptych.families.qwen2_audio import Qwen2Audio
from triptych.integrations.vllm.families import item_adapter, pulled_adapter


class Other:
    def __init__(self, model_type: str) -> None:
        self.model_type = model_type


@pytest.mark.parametrize("model_type", ["granite_speech", "mllama", "voxtral"])
def test_other_families_are_refused_by_name(model_type: str) -> None:
    family: Any = Other(model_type)
    with pytest.raises(BadModel, match=f"engine vllm does not serve model_type '{model_type}'; it serves: gemma3, "):
        item_adapter(family, DType.F32)


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_audio", "voxtral"])
def test_a_vllm_that_runs_by_itself_pulls_items_of_tested_families_only(model_type: str) -> None:
    family: Any = Other(model_type)
    with pytest.raises(BadModel, match=f"model_type '{model_type}'; it serves: llava, qwen2_5_vl, qwen3_vl$"):
        pulled_adapter(family, DType.F32)


def test_an_item_has_one_row_per_position_and_the_modality_of_its_family() -> None:
    window: Any = None
    adapter = item_adapter(Qwen2Audio(placeholder_id=9, hidden_size=8, context_length=64, window=window), DType.F32)
    assert adapter.modality == "audio"
    assert adapter.accepts(5, [TensorSpec(EMBEDS, DType.F32, (5, 8))])
    assert not adapter.accepts(5, [TensorSpec(EMBEDS, DType.F32, (4, 8))])
    assert not adapter.accepts(5, [TensorSpec(EMBEDS, DType.F32, (5, 9))])


def test_gemma3_on_a_cpu_warns_of_its_attention(caplog: pytest.LogCaptureFixture) -> None:
    family = Gemma3(
        placeholder_id=9, hidden_size=8, context_length=64, begin_id=3, begin="<", end=">", tokens_per_image=4
    )
    with caplog.at_level(logging.WARNING, logger="triptych"):
        assert item_adapter(family, DType.F32).modality == "image"
    assert "causal" in caplog.text
