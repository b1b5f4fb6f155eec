from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import GraniteSpeechFeatureExtractor

from tests.examples import examples
from tests.integration.families.tiny_granite_speech import provide_torchaudio
from tests.unit.families.kit import clip, image, model_files
from triptych.domain.embedding import DType, TensorSpec
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders, count_tokens
from triptych.families.granite_speech import GraniteSpeech
from triptych.families.model_files import BadModel, ModelFiles

_extractor: Any = GraniteSpeechFeatureExtractor  # transformers leaves these untyped
AUDIO_ID = 49_155


def files(config: dict[str, Any] | None = None, extractor: dict[str, Any] | None = None) -> ModelFiles:
    """The files of Granite Speech 3.3 2B; most values are transformers' defaults."""
    return model_files(
        config={
            "model_type": "granite_speech",
            "text_config": {"model_type": "granite", "hidden_size": 2048, "max_position_embeddings": 131_072},
            "encoder_config": {"model_type": "granite_speech_encoder"},
        }
        | (config or {}),
        image_processor={"sampling_rate": 16_000} | (extractor or {}),
    )


FAMILY = GraniteSpeech.load(files())


def test_published_files() -> None:
    assert FAMILY.placeholder_ids == {AUDIO_ID}
    assert (FAMILY.hidden_size, FAMILY.context_length) == (2048, 131_072)
    assert FAMILY.prompt_replacement(clip(16_000)) == (Placeholders(AUDIO_ID, 12),)
    assert FAMILY.outputs(clip(16_000), DType.F32) == (TensorSpec("embeds", DType.F32, (12, 2048)),)
    assert count_tokens(FAMILY, clip(44_100, 44_100)) == 12


@pytest.fixture(scope="module")
def real() -> Any:
    provide_torchaudio()
    return _extractor()


@pytest.mark.slow
@settings(max_examples=examples(1000), deadline=None)
@given(st.integers(257, 40_000_000))
@example(257)
@example(4_799)
@example(4_800)
def test_counts_equal_those_of_the_processor(real: Any, samples: int) -> None:
    assert count_tokens(FAMILY, clip(samples)) == real._get_num_audio_features([samples])[0]


@pytest.mark.parametrize("samples", [257, 1_000, 2_399, 2_400, 12_345])
def test_counts_equal_the_frames_of_the_spectrogram(real: Any, samples: int) -> None:
    frames = real(np.zeros(samples, dtype=np.float32))["input_features"].shape[1]
    assert count_tokens(FAMILY, clip(samples)) == -(-frames // 15) * 3


@pytest.mark.parametrize("samples", [0, 159, 256])
def test_a_clip_shorter_than_one_transform_is_refused(samples: int) -> None:
    with pytest.raises(InvalidMedia, match="too short"):
        FAMILY.prompt_replacement(clip(samples))


def test_other_media_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="audio"):
        FAMILY.prompt_replacement(image(10, 10))


@pytest.mark.parametrize(
    ("config", "extractor", "named"),
    [
        ({"window_size": 10}, {}, "window_size"),
        ({}, {"projector_downsample_rate": 3}, "downsample_rate"),
        ({"encoder_config": {"input_dim": 80}}, {}, "input_dim"),
    ],
)
def test_files_that_contradict_each_other_are_refused(
    config: dict[str, Any], extractor: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadModel, match=named):
        GraniteSpeech.load(files(config, extractor))
