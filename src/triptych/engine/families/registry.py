"""The families that the engines can run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.anyres import LlavaNextEncoder, LlavaOneVisionEncoder
from triptych.engine.families.gemma3 import Gemma3Encoder, Gemma3Text
from triptych.engine.families.granite_speech import GraniteSpeechEncoder, GraniteSpeechText
from triptych.engine.families.halves import EncoderHalf, TextHalf
from triptych.engine.families.idefics3 import Idefics3Encoder
from triptych.engine.families.internvl import InternVlEncoder
from triptych.engine.families.mllama import MllamaEncoder, MllamaText
from triptych.engine.families.plain import PlainText
from triptych.engine.families.qwen2_audio import Qwen2AudioEncoder
from triptych.engine.families.qwen_vl import QwenEncoder, QwenText
from triptych.engine.families.tiles import TileEncoder
from triptych.engine.families.voxtral import VoxtralEncoder
from triptych.families.model_files import BadModel


@dataclass(frozen=True, slots=True)
class Halves:
    """How to wrap the two halves of a loaded model."""

    encoder: Callable[[PreTrainedModel, Checkpoint], EncoderHalf]
    text: Callable[[PreTrainedModel, Checkpoint], TextHalf]


HALVES: Mapping[str, Halves] = {
    "gemma3": Halves(encoder=Gemma3Encoder, text=Gemma3Text),
    "granite_speech": Halves(encoder=GraniteSpeechEncoder, text=GraniteSpeechText),
    "idefics3": Halves(encoder=Idefics3Encoder, text=PlainText),
    "internvl": Halves(encoder=InternVlEncoder, text=PlainText),
    "llava": Halves(encoder=TileEncoder, text=PlainText),
    "llava_next": Halves(encoder=LlavaNextEncoder, text=PlainText),
    "llava_onevision": Halves(encoder=LlavaOneVisionEncoder, text=PlainText),
    "mllama": Halves(encoder=MllamaEncoder, text=MllamaText),
    "qwen2_audio": Halves(encoder=Qwen2AudioEncoder, text=PlainText),
    "qwen2_5_vl": Halves(encoder=QwenEncoder, text=QwenText),
    "qwen2_vl": Halves(encoder=QwenEncoder, text=QwenText),
    "qwen3_vl": Halves(encoder=QwenEncoder, text=QwenText),
    "smolvlm": Halves(encoder=Idefics3Encoder, text=PlainText),
    "voxtral": Halves(encoder=VoxtralEncoder, text=PlainText),
}
"""By ``model_type``, as ``triptych.families.registry.FAMILIES``."""


def halves_of(checkpoint: Checkpoint) -> Halves:
    """Raises BadModel for a family that nobody has written the two halves of."""
    model_type = checkpoint.files.model_type
    if model_type not in HALVES:
        raise BadModel(
            f"no engine for model_type {model_type!r}; there are: {', '.join(sorted(HALVES))}. To add one, write classes "
            "that satisfy triptych.engine.families.halves and name them in triptych.engine.families.registry.HALVES"
        )
    return HALVES[model_type]
