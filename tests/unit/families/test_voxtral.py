from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import VoxtralProcessor, WhisperFeatureExtractor

from tests.examples import examples
from tests.integration.families.harness import tokenizer
from tests.unit.families.kit import clip, image, model_files
from triptych.domain.embedding import DType, TensorSpec
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders, count_tokens
from triptych.families.model_files import BadModel, ModelFiles
from triptych.families.voxtral import Voxtral

_extractor: Any = WhisperFeatureExtractor  # transformers leaves these untyped
_processor: Any = VoxtralProcessor
AUDIO_ID = 24


def files(audio: dict[str, Any] | None = None, extractor: dict[str, Any] | None = None) -> ModelFiles:
    """The files of Voxtral Mini 3B."""
    return model_files(
        config={
            "model_type": "voxtral",
            "audio_token_id": AUDIO_ID,
            "text_config": {"model_type": "llama"},
            "audio_config": {"model_type": "voxtral_encoder"} | (audio or {}),
        },
        image_processor={"feature_size": 128, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30}
        | (extractor or {}),
    )


def test_published_files() -> None:
    family = Voxtral.load(files())
    assert family.placeholder_ids == {AUDIO_ID}
    assert (family.hidden_size, family.context_length) == (3072, 131_072)
    assert family.prompt_replacement(clip(480_000)) == (Placeholders(AUDIO_ID, 375),)
    assert family.prompt_replacement(clip(480_001)) == (Placeholders(AUDIO_ID, 750),)
    assert family.outputs(clip(1), DType.BF16) == (TensorSpec("embeds", DType.BF16, (375, 3072)),)


_ONE_SECOND = Voxtral.load(files({"max_source_positions": 50, "intermediate_size": 6400}, {"chunk_length": 1}))
_REAL = _processor(_extractor(feature_size=8, chunk_length=1), tokenizer("[AUDIO]"))


@pytest.mark.slow
@settings(max_examples=examples(1000), deadline=None)
@given(st.integers(1, 48_000))
@example(16_000)
@example(16_001)
def test_counts_equal_those_of_the_processor(samples: int) -> None:
    windows = _REAL._retrieve_input_features(
        [np.zeros(samples, dtype=np.float32)],
        100,
        sampling_rate=16_000,
        padding=True,
        truncation=False,
        pad_to_multiple_of=16_000,
        return_tensors="pt",
    )
    assert count_tokens(_ONE_SECOND, clip(samples)) == 10 * len(windows)


def test_other_media_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="audio"):
        Voxtral.load(files()).prompt_replacement(image(10, 10))
    with pytest.raises(InvalidMedia, match="too short"):
        Voxtral.load(files()).prompt_replacement(clip(0))


@pytest.mark.parametrize(
    ("audio", "extractor", "named"),
    [
        ({"max_source_positions": 1000}, {}, "max_source_positions"),
        ({"intermediate_size": 5121}, {}, "intermediate_size"),
        ({}, {"feature_size": 80}, "feature_size"),
    ],
)
def test_contradictory_configurations_are_refused(audio: dict[str, Any], extractor: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModel, match=named):
        Voxtral.load(files(audio, extractor))
