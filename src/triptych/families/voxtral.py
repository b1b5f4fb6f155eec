"""Voxtral: a Whisper encoder takes a clip in windows of 30 s, the last one padded; each has as many tokens."""

from dataclasses import dataclass
from typing import ClassVar, Self

from triptych.domain.media import MediaInfo, Modality
from triptych.families.audio_window import Window, refuse_too_short
from triptych.families.base import Placeholders, PromptReplacement, refuse_unless
from triptych.families.defaults import AUDIO_DEFAULTS, VOXTRAL_TEXT_DEFAULTS
from triptych.families.fields import integer, section
from triptych.families.model_files import BadModel, ModelFiles
from triptych.families.plain import Plain


@dataclass(frozen=True, slots=True)
class Voxtral(Plain):
    modality: ClassVar = Modality.AUDIO

    window: Window
    tokens_per_window: int
    model_type: str = "voxtral"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        text = section(files.config, "text_config", "llama", VOXTRAL_TEXT_DEFAULTS)
        encoder = section(files.config, "audio_config", "voxtral_encoder", AUDIO_DEFAULTS)
        # Adjacent frames are concatenated to the projector's input width.
        numbers = integer(encoder, "max_source_positions") * integer(encoder, "d_model", "hidden_size")
        tokens, rest = divmod(numbers, integer(encoder, "intermediate_size"))
        if rest or not tokens:
            raise BadModel(f"audio_config.intermediate_size {encoder['intermediate_size']} does not divide {numbers}")
        return cls(
            placeholder_id=integer(files.config, "audio_token_id"),
            hidden_size=integer(text, "hidden_size"),
            context_length=integer(text, "max_position_embeddings"),
            window=Window.load(files, encoder),
            tokens_per_window=tokens,
        )

    @property
    def sample_rate_hz(self) -> int:
        return self.window.sample_rate_hz

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        return (Placeholders(self.placeholder_id, sum(self.units(info))),)

    def units(self, info: MediaInfo) -> tuple[int, ...]:
        """Units of a clip: one per window."""
        refuse_unless(info, Modality.AUDIO)
        windows = -(-info.samples_at(self.sample_rate_hz) // self.window.samples)
        refuse_too_short(info, windows)
        return (self.tokens_per_window,) * windows
