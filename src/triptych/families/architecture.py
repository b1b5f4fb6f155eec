"""Architectures of whole models, from their configuration files alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, Self

from triptych.domain.architecture import DecoderArchitecture, EncoderArchitecture, EncoderItem
from triptych.domain.embedding import DType, embedding_tokens
from triptych.domain.media import MediaInfo
from triptych.families.base import Family
from triptych.families.defaults import (
    AUDIO_DEFAULTS,
    TEXT_DEFAULTS,
    TIED_BY_DEFAULT,
    VISION_DEFAULTS,
    VOXTRAL_TEXT_DEFAULTS,
    WHISPER_DEFAULTS,
)
from triptych.families.encoders import Encoder, encoder_of
from triptych.families.fields import integer, section, square
from triptych.families.language_models import language_model, whisper_decoder
from triptych.families.model_files import BadModel, Json, ModelFiles
from triptych.families.registry import written_family

_TEXT_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "granite_speech": "granite",
    "internvl": "qwen2",
    "llava_onevision": "qwen2",
    "mllama": "mllama_text_model",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}
"""Language models of families whose default is not Llama."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Parts of a model, and what they consist of."""

    family: Family
    decoder: DecoderArchitecture
    _encoder: Encoder

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        """Raises BadModel. Where there is only ``config.json``, processors are taken to be those that fit the encoder."""
        try:
            family = written_family(with_usual_processors(files))
            return cls(family, _decoder(files), encoder_of(family, files.config))
        except BadModel:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadModel(f"config.json describes no {files.model_type} whose costs can be counted: {error}") from None

    def encoder(self, infos: Iterable[MediaInfo], dtype: DType) -> EncoderArchitecture:
        """The encoder, and what these items cost it; of several with as many tokens the first. Raises InvalidMedia."""
        items: dict[int, EncoderItem] = {}
        for info in infos:
            outputs = self.family.outputs(info, dtype)
            tokens = embedding_tokens(outputs)
            work = self._encoder.work(info)
            rows = work.products // (2 * self._encoder.parameters)
            items.setdefault(tokens, EncoderItem(tokens, sum(spec.nbytes for spec in outputs), work, rows))
        by_size = tuple(items[tokens] for tokens in sorted(items))
        encoder = self._encoder
        return EncoderArchitecture(encoder.parameters, encoder.depth, encoder.width, encoder.row_values, by_size)


def _decoder(files: ModelFiles) -> DecoderArchitecture:
    config, model_type = files.config, files.model_type
    if model_type == "whisper":
        return whisper_decoder({**WHISPER_DEFAULTS, **config}, tied=_is_tied(config, {}))
    nested = config.get("text_config")
    given = nested if isinstance(nested, dict) else {name: config[name] for name in config if name != "model_type"}
    defaults = VOXTRAL_TEXT_DEFAULTS if model_type == "voxtral" else TEXT_DEFAULTS
    text = section({"text_config": given}, "text_config", _TEXT_TYPES.get(model_type, "llama"), defaults)
    if model_type.endswith("_vl"):
        text["model_type"] = _TEXT_TYPES[model_type]  # older checkpoints name it differently
        text = {**defaults[text["model_type"]], **text}
    return language_model(text, tied=_is_tied(config, given))


def _is_tied(config: Json, given: Json) -> bool:
    default = config.get("model_type") in TIED_BY_DEFAULT
    return bool(config.get("tie_word_embeddings", given.get("tie_word_embeddings", default)))


def with_usual_processors(files: ModelFiles) -> ModelFiles:
    """The files, with processors that fit the encoder and usual names of tokens where there is only ``config.json``."""
    if files.image_processor or files.processor or files.tokenizer_config:
        return files
    usual = _USUAL.get(files.model_type)
    given: Mapping[str, Any] = {} if usual is None else usual(files.config)
    return replace(files, **given)


def _tiled(config: Json) -> Mapping[str, Any]:
    """Of the LLaVA family: tiles of the encoder's size."""
    kind = "siglip_vision_model" if config.get("model_type") == "llava_onevision" else "clip_vision_model"
    vision = section(config, "vision_config", kind, VISION_DEFAULTS)
    side = integer(vision, "image_size")
    image = {"size": {"height": side, "width": side}, "crop_size": {"height": side, "width": side}}
    image |= {name: config[name] for name in ("image_grid_pinpoints",) if name in config}
    tokens = (side // integer(vision, "patch_size")) ** 2
    processor = {"num_image_tokens": tokens} if config.get("model_type") == "llava_onevision" else {}
    return {"image_processor": image, "processor": processor}


def _qwen(config: Json) -> Mapping[str, Any]:
    vision = {**VISION_DEFAULTS[str(config.get("model_type"))], **config.get("vision_config", {})}
    sizes = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
    }
    return {"image_processor": sizes, "video_processor": sizes}


def _internvl(config: Json) -> Mapping[str, Any]:
    vision = section(config, "vision_config", "internvl_vision", VISION_DEFAULTS)
    side = square(vision, "image_size")
    tokens = int(side // square(vision, "patch_size") * config.get("downsample_ratio", 0.5)) ** 2
    return {
        "image_processor": {"size": {"height": side, "width": side}},
        "processor": {"image_seq_length": tokens},
        "tokenizer_config": {"start_image_token": "<img>", "end_image_token": "</img>"},
    }


def _gemma3(config: Json) -> Mapping[str, Any]:
    side = square(section(config, "vision_config", "siglip_vision_model", VISION_DEFAULTS), "image_size")
    tokens = isqrt(integer({"mm_tokens_per_image": 256, **config}, "mm_tokens_per_image")) ** 2
    return {
        "image_processor": {"size": {"height": side, "width": side}},
        "processor": {"image_seq_length": tokens},
    }


def _idefics3(config: Json) -> Mapping[str, Any]:
    vision = section(config, "vision_config", f"{config.get('model_type')}_vision", VISION_DEFAULTS)
    side, scale = square(vision, "image_size"), config.get("scale_factor", 2)
    tokens = (side // square(vision, "patch_size")) ** 2 // scale**2
    return {
        "image_processor": {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}},
        "processor": {"image_seq_len": tokens},
    }


def _mllama(config: Json) -> Mapping[str, Any]:
    vision = section(config, "vision_config", "mllama_vision_model", VISION_DEFAULTS)
    side = integer(vision, "image_size")
    size = {"height": side, "width": side}
    return {"image_processor": {"size": size, "max_image_tiles": integer(vision, "max_num_tiles")}}


def _whisper(config: Json) -> Mapping[str, Any]:
    if config.get("model_type") == "whisper":
        encoder = {**WHISPER_DEFAULTS, **config}
    else:
        kind = "voxtral_encoder" if config.get("model_type") == "voxtral" else "qwen2_audio_encoder"
        encoder = section(config, "audio_config", kind, AUDIO_DEFAULTS)
    seconds = 2 * integer(encoder, "max_source_positions") // 100
    return {"image_processor": {"feature_size": integer(encoder, "num_mel_bins"), "chunk_length": seconds}}


def _granite_speech(config: Json) -> Mapping[str, Any]:
    encoder = section(config, "encoder_config", "granite_speech_encoder", AUDIO_DEFAULTS)
    return {
        "image_processor": {
            "n_mels": integer(encoder, "input_dim") // 2,
            "projector_window_size": config.get("window_size", 15),
            "projector_downsample_rate": config.get("downsample_rate", 5),
        }
    }


_USUAL = {
    "gemma3": _gemma3,
    "granite_speech": _granite_speech,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _tiled,
    "llava_next": _tiled,
    "llava_onevision": _tiled,
    "mllama": _mllama,
    "qwen2_5_vl": _qwen,
    "qwen2_audio": _whisper,
    "qwen2_vl": _qwen,
    "qwen3_vl": _qwen,
    "smolvlm": _idefics3,
    "voxtral": _whisper,
    "whisper": _whisper,
}
