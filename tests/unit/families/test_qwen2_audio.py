from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

from tests.examples import examples
from tests.integration.families.harness import tokenizer
from tests.unit.families.kit import clip, image, model_files
from triptych.domain.embedding import DType, TensorSpec
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders, count_tokens
from triptych.families.model_files import BadModel, ModelFiles
from triptych.families.qwen2_audio import Qwen2Audio

_extractor: Any = WhisperFeatureExtractor  # transformers leaves these untyped
_processor: Any = Qwen2AudioProcessor
AUDIO_ID = 151_646


def files(audio: dict[str, Any] | None = None, extractor: dict[str, Any] | None = None) -> ModelFiles:
    """The files of Qwen2-Audio 7B; ``audio_token_index`` and sizes are transformers' defaults."""
    return model_files(
        config={
            "model_type": "qwen2_audio",
            "text_config": {"model_type": "qwen2", "max_position_embeddings": 8192},
            "audio_config": {"model_type": "qwen2_audio_encoder"} | (audio or {}),
        },
        image_processor={"feature_size": 128, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30}
        | (extractor or {}),
    )


def one_second() -> Qwen2Audio:
    return Qwen2Audio.load(files({"max_source_positions": 50}, {"chunk_length": 1}))


def test_published_files() -> None:
    family = Qwen2Audio.load(files())
    assert family.placeholder_ids == {AUDIO_ID}
    assert (family.hidden_size, family.context_length) == (4096, 8192)
    assert family.prompt_replacement(clip(480_000)) == (Placeholders(AUDIO_ID, 750),)
    assert family.outputs(clip(16_000), DType.BF16) == (TensorSpec("embeds", DType.BF16, (25, 4096)),)


def test_audio_beyond_the_window_is_not_counted() -> None:
    family = Qwen2Audio.load(files())
    assert count_tokens(family, clip(2_000_000)) == count_tokens(family, clip(480_000)) == 750


def test_clips_are_counted_at_the_rate_of_the_model() -> None:
    family = Qwen2Audio.load(files())
    assert count_tokens(family, clip(44_100 * 3, 44_100)) == count_tokens(family, clip(48_000)) == 75


@pytest.mark.slow
@settings(max_examples=examples(1000), deadline=None)
@given(st.integers(321, 20_000))
@example(16_000)
def test_counts_equal_those_of_the_processor(samples: int) -> None:
    made, _ = _REAL._process_audio([np.zeros(samples, dtype=np.float32)], sampling_rate=16_000)
    assert count_tokens(_ONE_SECOND, clip(samples)) == made["num_audio_tokens"][0]


_ONE_SECOND = one_second()
_REAL = _processor(_extractor(feature_size=8, chunk_length=1), tokenizer("<|AUDIO|>"))


@pytest.mark.parametrize("samples", [1, 160, 320])
def test_a_clip_without_any_token_is_refused(samples: int) -> None:
    with pytest.raises(InvalidMedia, match="too short"):
        Qwen2Audio.load(files()).prompt_replacement(clip(samples))


def test_other_media_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="audio"):
        Qwen2Audio.load(files()).prompt_replacement(image(10, 10))


@pytest.mark.parametrize(
    ("audio", "extractor", "named"),
    [
        ({"max_source_positions": 750}, {}, "max_source_positions"),
        ({}, {"chunk_length": 15}, "chunk_length"),
        ({"num_mel_bins": 80}, {}, "num_mel_bins"),
        ({}, {"hop_length": 0}, "hop_length"),
    ],
)
def test_contradictory_configurations_are_refused(audio: dict[str, Any], extractor: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModel, match=named):
        Qwen2Audio.load(files(audio, extractor))


def test_a_feature_extractor_nested_in_the_processor_takes_precedence() -> None:
    nested = {"feature_extractor": {"feature_size": 128, "chunk_length": 30}}
    outer = files(extractor={"chunk_length": 1})
    assert Qwen2Audio.load(model_files(config=dict(outer.config), processor=nested)).window.samples == 480_000
