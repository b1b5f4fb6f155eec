"""Granite Speech: a conformer encodes the whole clip; each window of its frames becomes a few tokens."""

from dataclasses import dataclass
from typing import ClassVar, Self

from triptych.domain.media import MediaInfo, Modality
from triptych.families.audio_window import refuse_too_short
from triptych.families.base import Placeholders, PromptReplacement, refuse_unless
from triptych.families.defaults import AUDIO_DEFAULTS, TEXT_DEFAULTS
from triptych.families.fields import integer, section
from triptych.families.model_files import BadModel, Json, ModelFiles
from triptych.families.plain import Plain

EXTRACTOR_DEFAULTS: Json = {
    "sampling_rate": 16_000,
    "n_fft": 512,
    "win_length": 400,
    "hop_length": 160,
    "n_mels": 80,
    "projector_window_size": 15,
    "projector_downsample_rate": 5,
}
"""Defaults of ``GraniteSpeechFeatureExtractor``."""

_DEFAULTS: Json = {"audio_token_index": 49_155, "window_size": 15, "downsample_rate": 5}


@dataclass(frozen=True, slots=True)
class GraniteSpeech(Plain):
    """``window_frames`` frames of the conformer become ``tokens_per_window`` tokens. A clip needs ``min_samples``."""

    modality: ClassVar = Modality.AUDIO

    sample_rate_hz: int
    hop: int
    window_frames: int
    tokens_per_window: int
    min_samples: int
    model_type: str = "granite_speech"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        config = {**_DEFAULTS, **files.config}
        text = section(files.config, "text_config", "granite", TEXT_DEFAULTS)
        encoder = section(files.config, "encoder_config", "granite_speech_encoder", AUDIO_DEFAULTS)
        extractor = {**EXTRACTOR_DEFAULTS, **files.feature_extractor}
        if integer(encoder, "input_dim") != 2 * integer(extractor, "n_mels"):
            raise BadModel(
                f"the feature extractor's n_mels is {extractor['n_mels']}, encoder_config.input_dim is not its double"
            )
        window = integer(extractor, "projector_window_size")
        downsample = integer(extractor, "projector_downsample_rate")
        for name, extracted in (("window_size", window), ("downsample_rate", downsample)):
            if integer(config, name) != extracted:
                raise BadModel(f"the feature extractor's projector_{name} is {extracted}, {name} is {config[name]}")
        return cls(
            placeholder_id=integer(config, "audio_token_id", "audio_token_index"),
            hidden_size=integer(text, "hidden_size"),
            context_length=integer(text, "max_position_embeddings"),
            sample_rate_hz=integer(extractor, "sampling_rate"),
            hop=integer(extractor, "hop_length"),
            window_frames=window,
            tokens_per_window=window // downsample,
            min_samples=integer(extractor, "n_fft") // 2 + 1,  # the spectrogram mirrors half a transform at each end
        )

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        """Counts like ``GraniteSpeechFeatureExtractor``: two spectra make one conformer frame."""
        refuse_unless(info, Modality.AUDIO)
        samples = info.samples_at(self.sample_rate_hz)
        frames = (samples // self.hop + 1) // 2
        tokens = -(-frames // self.window_frames) * self.tokens_per_window
        refuse_too_short(info, tokens if samples >= self.min_samples else 0)
        return (Placeholders(self.placeholder_id, tokens),)
