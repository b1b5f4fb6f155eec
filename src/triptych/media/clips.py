"""Header fields of a video or audio clip, and the allowed codecs.

The container readers in this package parse structure by hand and decode nothing, as ``media.headers`` does for images: the
process that takes requests hands untrusted bytes to no decoder. They raise InvalidMedia only, or ``struct.error`` or
IndexError where the file ends too soon.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from triptych.domain.media import Modality
from triptych.errors import InvalidMedia

MAX_PARTS = 262_144
"""Most boxes, blocks, pages or frames of a file: two hours of MP3."""

_SAMPLE_RATES_HZ = range(1000, 768_001)
_MAX_TRACKS = 64
"""Bounded because each part searches the tracks for its own."""


class VideoCodec(Enum):
    """Values are libavcodec's names."""

    H264 = "h264"
    HEVC = "hevc"
    VP8 = "vp8"
    VP9 = "vp9"
    AV1 = "av1"


@dataclass(frozen=True, slots=True)
class Clip:
    """``width`` and ``height`` are in pixels as stored; ``rotation_deg`` is the clockwise rotation to apply.

    The other fields are those of ``domain.media.MediaInfo``.
    """

    modality: Modality
    format: str
    width: int = 0
    height: int = 0
    rotation_deg: int = 0
    frames: int = 1
    duration_s: float = 0.0
    samples: int = 0
    sample_rate_hz: int = 0


def audio(form: str, samples: int, sample_rate_hz: int) -> Clip:
    """An audio clip. Raises InvalidMedia when it is empty or has no usual sample rate.

    Resampling one of a few samples per second would make gigabytes of a few bytes.
    """
    if sample_rate_hz not in _SAMPLE_RATES_HZ:
        raise InvalidMedia(
            f"the {form} audio has {sample_rate_hz} samples per second; "
            f"{_SAMPLE_RATES_HZ.start} to {_SAMPLE_RATES_HZ[-1]} are supported"
        )
    if samples < 1:
        raise InvalidMedia(f"the {form} audio is empty, or does not say how long it is")
    return Clip(
        Modality.AUDIO, form, duration_s=samples / sample_rate_hz, samples=samples, sample_rate_hz=sample_rate_hz
    )


def count_parts(what: str) -> Iterator[int]:
    """Count a file's parts up to the limit, then raise InvalidMedia."""
    yield from range(MAX_PARTS)
    raise InvalidMedia(f"the {what} has more than {MAX_PARTS} parts")


def refuse_more_tracks(what: str, tracks: int) -> None:
    """Raises InvalidMedia when a file with ``tracks`` tracks has reached the limit."""
    if tracks >= _MAX_TRACKS:
        raise InvalidMedia(f"the {what} has more than {_MAX_TRACKS} tracks")
