"""The families that the engines can run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.adapters import DecoderAdapter, EncoderAdapter
from triptych.engine.families.anyres import LlavaNextEncoder, LlavaOneVisionEncoder
from triptych.engine.families.gemma3 import Gemma3Decoder, Gemma3Encoder
from triptych.engine.families.generic import GenericDecoder, GenericEncoder
from triptych.engine.families.granite_speech import GraniteSpeechDecoder, GraniteSpeechEncoder
from triptych.engine.families.idefics3 import Idefics3Encoder
from triptych.engine.families.internvl import InternVlEncoder
from triptych.engine.families.mllama import MllamaDecoder, MllamaEncoder
from triptych.engine.families.plain import PlainDecoder
from triptych.engine.families.qwen2_audio import Qwen2AudioEncoder
from triptych.engine.families.qwen_vl import QwenDecoder, QwenEncoder
from triptych.engine.families.tiles import TileEncoder
from triptych.engine.families.voxtral import VoxtralEncoder
from triptych.engine.families.whisper import WhisperDecoder, WhisperEncoder
from triptych.families.generic import GenericFamily
from triptych.families.model_files import BadModel
from triptych.families.registry import model_plugin


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a family."""

    encoder: Callable[[PreTrainedModel, Checkpoint], EncoderAdapter]
    decoder: Callable[[PreTrainedModel, Checkpoint], DecoderAdapter]


ADAPTERS: Mapping[str, Adapters] = {
    "gemma3": Adapters(encoder=Gemma3Encoder, decoder=Gemma3Decoder),
    "granite_speech": Adapters(encoder=GraniteSpeechEncoder, decoder=GraniteSpeechDecoder),
    "idefics3": Adapters(encoder=Idefics3Encoder, decoder=PlainDecoder),
    "internvl": Adapters(encoder=InternVlEncoder, decoder=PlainDecoder),
    "llava": Adapters(encoder=TileEncoder, decoder=PlainDecoder),
    "llava_next": Adapters(encoder=LlavaNextEncoder, decoder=PlainDecoder),
    "llava_onevision": Adapters(encoder=LlavaOneVisionEncoder, decoder=PlainDecoder),
    "mllama": Adapters(encoder=MllamaEncoder, decoder=MllamaDecoder),
    "qwen2_audio": Adapters(encoder=Qwen2AudioEncoder, decoder=PlainDecoder),
    "qwen2_5_vl": Adapters(encoder=QwenEncoder, decoder=QwenDecoder),
    "qwen2_vl": Adapters(encoder=QwenEncoder, decoder=QwenDecoder),
    "qwen3_vl": Adapters(encoder=QwenEncoder, decoder=QwenDecoder),
    "smolvlm": Adapters(encoder=Idefics3Encoder, decoder=PlainDecoder),
    "voxtral": Adapters(encoder=VoxtralEncoder, decoder=PlainDecoder),
    "whisper": Adapters(encoder=WhisperEncoder, decoder=WhisperDecoder),
}
"""Adapters by ``model_type``, as in ``triptych.families.registry.FAMILIES``."""


def adapters_of(checkpoint: Checkpoint) -> Adapters:
    """The adapters of a family, here or in a plug-in. Raises BadModel for a family without adapters."""
    if isinstance(checkpoint.family, GenericFamily):
        return Adapters(encoder=GenericEncoder, decoder=GenericDecoder)
    model_type = checkpoint.files.model_type
    if model_type in ADAPTERS:
        return ADAPTERS[model_type]
    adapters = model_plugin("triptych.adapters", model_type)
    if not isinstance(adapters, Adapters):
        raise BadModel(
            f"no engine for model_type {model_type!r}; there are: {', '.join(sorted(ADAPTERS))}. To add one, write classes "
            "that satisfy triptych.engine.families.adapters and name them in triptych.engine.families.registry.ADAPTERS "
            "or in a package's entry points"
        )
    return adapters
