"""Model files and media for the tests of families."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from triptych.domain.media import MediaInfo, Modality
from triptych.families.model_files import ModelFiles


def model_files(
    *,
    config: dict[str, Any],
    processor: dict[str, Any] | None = None,
    image_processor: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
) -> ModelFiles:
    """``image_processor`` is written to ``preprocessor_config.json``, whatever it contains."""
    return ModelFiles(
        directory=Path(),
        config=config,
        processor=processor or {},
        image_processor=image_processor or {},
        tokenizer_config=tokenizer_config or {},
        generation_config={},
        chat_template=None,
    )


def image(width: int, height: int, modality: Modality = Modality.IMAGE) -> MediaInfo:
    return MediaInfo(modality, "png", width, height, 1, bytes(32))


def random_sizes(longest: int, count: int = 1000) -> Iterator[tuple[int, int]]:
    """Widths and heights, the same on every run: ``count`` random ones, then very narrow and square ones.

    A loop, since hypothesis would take most of the time: the processors are run on pixels.
    """
    rng = Random(longest)
    for _ in range(count):
        yield rng.randint(1, longest), rng.randint(1, longest)
    yield from ((longest, longest), (1, 1), (longest, 1), (1, longest))


def clip(samples: int, sample_rate_hz: int = 16_000) -> MediaInfo:
    seconds = samples / sample_rate_hz
    return MediaInfo(
        Modality.AUDIO, "wav", 0, 0, 1, bytes(32), duration_s=seconds, samples=samples, sample_rate_hz=sample_rate_hz
    )
