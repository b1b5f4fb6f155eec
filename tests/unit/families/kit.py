"""Model files and media as families are asked about them."""

from pathlib import Path
from typing import Any

from triptych.domain.media import MediaInfo, Modality
from triptych.families.model_files import ModelFiles


def model_files(
    *,
    config: dict[str, Any],
    processor: dict[str, Any] | None = None,
    image_processor: dict[str, Any] | None = None,
) -> ModelFiles:
    """``image_processor`` stands for ``preprocessor_config.json``, whatever is in it."""
    return ModelFiles(
        directory=Path(),
        config=config,
        processor=processor or {},
        image_processor=image_processor or {},
        tokenizer_config={},
        generation_config={},
        chat_template=None,
    )


def image(width: int, height: int) -> MediaInfo:
    return MediaInfo(Modality.IMAGE, "png", width, height, 1, bytes(32))


def clip(samples: int, sample_rate_hz: int = 16_000) -> MediaInfo:
    seconds = samples / sample_rate_hz
    return MediaInfo(
        Modality.AUDIO, "wav", 0, 0, 1, bytes(32), duration_s=seconds, samples=samples, sample_rate_hz=sample_rate_hz
    )
