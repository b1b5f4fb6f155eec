"""Qwen2-Audio: a Whisper encoder takes one window (30 s) of a clip, padded or cut; two frames are pooled per token."""

from dataclasses import dataclass
from typing import ClassVar, Self

from triptych.domain.media import MediaInfo, Modality
from triptych.families.audio_window import Window, refuse_too_short
from triptych.families.base import Placeholders, PromptReplacement, refuse_unless
from triptych.families.defaults import AUDIO_DEFAULTS, TEXT_DEFAULTS
from triptych.families.fields import integer, section
from triptych.families.model_files import Json, ModelFiles
from triptych.families.plain import Plain

_DEFAULTS: Json = {"audio_token_index": 151_646}


@dataclass(frozen=True, slots=True)
class Qwen2Audio(Plain):
    modality: ClassVar = Modality.AUDIO

    window: Window
    model_type: str = "qwen2_audio"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        text = section(files.config, "text_config", "qwen2", TEXT_DEFAULTS)
        encoder = section(files.config, "audio_config", "qwen2_audio_encoder", AUDIO_DEFAULTS)
        return cls(
            placeholder_id=integer({**_DEFAULTS, **files.config}, "audio_token_id", "audio_token_index"),
            hidden_size=integer(text, "hidden_size"),
            context_length=integer(text, "max_position_embeddings"),
            window=Window.load(files, encoder),
        )

    @property
    def sample_rate_hz(self) -> int:
        return self.window.sample_rate_hz

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        """Counts like ``Qwen2AudioProcessor``; the clip after the window is ignored."""
        refuse_unless(info, Modality.AUDIO)
        taken = min(info.samples_at(self.sample_rate_hz), self.window.samples)
        frames = -(-taken // self.window.hop)
        tokens = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        refuse_too_short(info, tokens)
        return (Placeholders(self.placeholder_id, tokens),)
