from dataclasses import replace
from typing import Any

import pytest

from tests.unit.families.kit import clip, image, model_files
from triptych.domain.embedding import DType, TensorSpec
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders
from triptych.families.model_files import BadModel, ModelFiles
from triptych.families.whisper import Whisper

START = 50_258


def files(
    changes: dict[str, Any] | None = None,
    extractor: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
) -> ModelFiles:
    """The files of Whisper large-v3, with two of its languages."""
    languages = {"is_multilingual": True, "lang_to_id": {"<|en|>": 50_259, "<|fr|>": 50_265}}
    made = model_files(
        config={
            "model_type": "whisper",
            "d_model": 1280,
            "num_mel_bins": 128,
            "decoder_start_token_id": START,
            **(changes or {}),
        },
        image_processor={"feature_size": 128, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30}
        | (extractor or {}),
    )
    return replace(made, generation_config=languages | (generation or {}))


def test_published_files() -> None:
    family = Whisper.load(files())
    assert family.placeholder_ids == {START}
    assert (family.hidden_size, family.context_length, family.languages) == (1280, 448, ("en", "fr"))


@pytest.mark.parametrize("samples", [1, 16_000, 480_000])
def test_every_clip_is_one_position_and_the_states_of_a_window(samples: int) -> None:
    family = Whisper.load(files())
    assert family.prompt_replacement(clip(samples)) == (Placeholders(START, 1),)
    assert family.outputs(clip(samples), DType.BF16) == (TensorSpec("states", DType.BF16, (1500, 1280)),)


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 44_100])
def test_a_clip_longer_than_the_window_is_refused_at_any_rate(rate_hz: int) -> None:
    family = Whisper.load(files())
    family.prompt_replacement(clip(30 * rate_hz, rate_hz))
    with pytest.raises(InvalidMedia, match=r"takes 31.0 s; the model hears up to 30 s"):
        family.prompt_replacement(clip(31 * rate_hz, rate_hz))


def test_other_media_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="audio"):
        Whisper.load(files()).prompt_replacement(image(10, 10))


@pytest.mark.parametrize("clips", [0, 2])
def test_a_request_has_one_clip(clips: int) -> None:
    with pytest.raises(InvalidMedia, match=f"one clip per request; this one has {clips}"):
        Whisper.load(files()).together([clip(16_000)] * clips)


def test_an_english_only_model_has_no_languages() -> None:
    assert Whisper.load(files(generation={"is_multilingual": False})).languages == ()
    assert Whisper.load(files(generation={"lang_to_id": None})).languages == ()


@pytest.mark.parametrize(
    ("changes", "extractor", "generation", "named"),
    [
        ({"max_source_positions": 750}, {}, {}, "max_source_positions"),
        ({}, {"chunk_length": 15}, {}, "chunk_length"),
        ({"num_mel_bins": 80}, {}, {}, "num_mel_bins"),
        ({}, {}, {"decoder_start_token_id": 1}, "decoder_start_token_id"),
        ({}, {}, {"lang_to_id": ["<|en|>"]}, "lang_to_id"),
    ],
)
def test_contradictory_configurations_are_refused(
    changes: dict[str, Any], extractor: dict[str, Any], generation: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadModel, match=named):
        Whisper.load(files(changes, extractor, generation))
