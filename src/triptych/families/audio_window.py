"""Fixed-length windows of audio, shared by the families with a Whisper-like encoder."""

from dataclasses import dataclass
from typing import Self

from triptych.domain.media import MediaInfo
from triptych.errors import InvalidMedia
from triptych.families.fields import integer
from triptych.families.model_files import BadModel, Json, ModelFiles

_WHISPER_DEFAULTS: Json = {"feature_size": 80, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30}


@dataclass(frozen=True, slots=True)
class Window:
    """The input of a Whisper-like encoder: ``samples`` at ``sample_rate_hz``, with one frame per ``hop`` samples."""

    sample_rate_hz: int
    hop: int
    samples: int

    @classmethod
    def load(cls, files: ModelFiles, encoder: Json) -> Self:
        """Load the window of the checkpoint's ``WhisperFeatureExtractor``. Raises BadModel unless it matches the
        ``encoder``'s configuration.
        """
        extractor = {**_WHISPER_DEFAULTS, **files.feature_extractor}
        rate, hop = integer(extractor, "sampling_rate"), integer(extractor, "hop_length")
        samples = rate * integer(extractor, "chunk_length")
        frames = 2 * integer(encoder, "max_source_positions")  # the encoder's second convolution has a stride of 2
        if samples != frames * hop:
            raise BadModel(
                f"the feature extractor's chunk_length is {extractor['chunk_length']} s, which is {samples / hop:g} "
                f"frames; max_source_positions takes {frames}"
            )
        if integer(extractor, "feature_size") != integer(encoder, "num_mel_bins"):
            raise BadModel(
                f"the feature extractor's feature_size is {extractor['feature_size']}, num_mel_bins is "
                f"{encoder['num_mel_bins']}"
            )
        return cls(rate, hop, samples)


def refuse_too_short(info: MediaInfo, tokens: int) -> None:
    """Raises InvalidMedia for a clip that yields no embedding."""
    if tokens < 1:
        raise InvalidMedia(
            f"the audio of {info.samples} samples at {info.sample_rate_hz} Hz is too short for the model"
        )
