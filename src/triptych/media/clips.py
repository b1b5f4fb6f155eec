"""What the header of a video or an audio clip says, and the allow-lists of what may stand in one.

The readers beside this module walk a container's structure by hand and decode nothing, as ``headers`` does for images:
the process that takes requests hands untrusted bytes to no decoder. Each raises InvalidMedia, or ``struct.error`` or
IndexError where the file ends too soon, and nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from triptych.domain.media import Modality
from triptych.errors import InvalidMedia

MAX_PARTS = 262_144
"""Boxes, blocks, pages or frames of a file that are looked at before it is refused: two hours of MP3."""

_MAX_TRACKS = 64
"""They are looked through for each part that belongs to one."""


class VideoCodec(Enum):
    """The value is what libavcodec calls it."""

    H264 = "h264"
    HEVC = "hevc"
    VP8 = "vp8"
    VP9 = "vp9"
    AV1 = "av1"


@dataclass(frozen=True, slots=True)
class Clip:
    """``width`` and ``height`` are in pixels as stored; ``rotation_deg``, clockwise, is what is to be applied.

    For what the rest means see ``domain.media.MediaInfo``.
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
    """An audio clip. Raises InvalidMedia for one that is empty or has no rate."""
    if not 0 < sample_rate_hz <= 768_000:
        raise InvalidMedia(f"the {form} audio has {sample_rate_hz} samples per second")
    if samples < 1:
        raise InvalidMedia(f"the {form} audio is empty, or does not say how long it is")
    return Clip(
        Modality.AUDIO, form, duration_s=samples / sample_rate_hz, samples=samples, sample_rate_hz=sample_rate_hz
    )


def count_parts(what: str) -> Iterator[int]:
    """Counts the parts of a file, up to the bound."""
    yield from range(MAX_PARTS)
    raise InvalidMedia(f"the {what} has more than {MAX_PARTS} parts")


def refuse_more_tracks(what: str, tracks: int) -> None:
    """Raises InvalidMedia where a file that has so many tracks may have no more."""
    if tracks >= _MAX_TRACKS:
        raise InvalidMedia(f"the {what} has more than {_MAX_TRACKS} tracks")
