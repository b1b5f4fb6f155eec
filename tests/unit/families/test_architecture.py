"""Architectures of published models from their ``config.json`` alone, as far as it says more than the defaults."""

from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from triptych.domain.embedding import DType
from triptych.families.architecture import Architecture
from triptych.families.model_files import BadModel, ModelFiles

PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "gemma3-4b": (
        4_300_079_472,
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "model_type": "siglip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
    "llama3.2-11b-vision": (
        10_670_220_835,
        {
            "model_type": "mllama",
            "text_config": {
                "model_type": "mllama_text_model",
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 40,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
            },
            "vision_config": {"image_size": 560, "model_type": "mllama_vision_model"},
        },
    ),
    "llava-1.5-7b": (
        7_063_427_072,
        {
            "model_type": "llava",
            "image_token_index": 32000,
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "image_size": 336,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
            },
        },
    ),
    "llava-next-mistral-7b": (
        7_566_747_648,
        {
            "model_type": "llava_next",
            "text_config": {
                "model_type": "mistral",
                "intermediate_size": 14336,
                "max_position_embeddings": 32768,
                "num_key_value_heads": 8,
                "sliding_window": None,
                "vocab_size": 32064,
            },
            "vision_config": {
                "hidden_size": 1024,
                "image_size": 336,
                "intermediate_size": 4096,
                "model_type": "clip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
            },
        },
    ),
    "qwen2-audio-7b": (
        8_397_094_912,
        {
            "model_type": "qwen2_audio",
            "audio_config": {"model_type": "qwen2_audio_encoder"},
            "text_config": {
                "model_type": "qwen2",
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "max_position_embeddings": 8192,
                "vocab_size": 156032,
            },
        },
    ),
    "qwen2-vl-2b": (
        2_208_985_600,
        {
            "model_type": "qwen2_vl",
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "vision_config": {
                "depth": 32,
                "embed_dim": 1280,
                "mlp_ratio": 4,
                "num_heads": 16,
                "hidden_size": 1536,
                "patch_size": 14,
            },
        },
    ),
    "qwen2.5-vl-7b": (
        8_292_166_656,
        {
            "model_type": "qwen2_5_vl",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 128000,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "sliding_window": 32768,
            "max_window_layers": 28,
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "out_hidden_size": 3584,
                "num_heads": 16,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "in_chans": 3,
            },
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_as_many_parameters_as_its_files(name: str) -> None:
    parameters, config = PUBLISHED[name]
    architecture = Architecture.load(ModelFiles(Path(), config, {}, {}, {}, {}, None))
    assert architecture.encoder([], DType.F16).parameters + architecture.decoder.parameters == parameters


ODD: tuple[Any, ...] = (None, "wide", -1, 0, 0.5, [], [7], {}, True)


def places(config: dict[str, Any], below: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*below, name)
        if isinstance(value, dict):
            yield from places(value, (*below, name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_of_another_kind_is_a_bad_model_or_makes_no_difference(name: str) -> None:
    _, config = PUBLISHED[name]
    for *sections, field in places(config):
        for odd in ODD:
            changed = deepcopy(config)
            section = changed
            for key in sections:
                section = section[key]
            section[field] = odd
            with suppress(BadModel):
                architecture = Architecture.load(ModelFiles(Path(), changed, {}, {}, {}, {}, None))
                assert architecture.decoder.parameters > 0
