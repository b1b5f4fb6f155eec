"""Identifies an item from its bytes, without decoding: format, size, duration and digest.

Headers are parsed here rather than by an image or video library. So the process that takes requests never hands
untrusted bytes to a decoder (ADR 58). The encoder finds damage behind a valid header.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from triptych.domain.limits import Positive, check_limits
from triptych.domain.media import MediaInfo, Modality, digest_of
from triptych.errors import InvalidMedia
from triptych.media.audio_headers import is_flac, is_mp3, is_wav, read_flac, read_mp3, read_ogg, read_wav
from triptych.media.clips import Clip
from triptych.media.headers import FORMATS, Header, read_header
from triptych.media.mp4 import is_mp4, read_mp4
from triptych.media.unsupported import unsupported_format
from triptych.media.webm import read_webm

_KNOWN = f"images ({', '.join(FORMATS)}), videos (mp4, mov, webm) and audio (wav, flac, mp3, ogg, m4a)"
_LEAST_SCANNED_PIXELS = 1 << 16


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one item, checked against its header.

    ``max_scanned_pixels``, ``max_video_pixels`` and ``max_audio_samples`` bound the time of decoding: some 0.7 ns per
    scanned pixel, so that no image takes more than about a second.
    """

    max_image_bytes: Positive = 20 << 20
    """Largest encoded image."""
    max_image_pixels: Positive = 64_000_000
    """Most pixels of one image or frame: 64 million are 192 MB as RGB."""
    max_image_side_px: Positive = 16_384
    """Longest side of an image or a frame."""
    max_aspect_ratio: Positive = 200
    """Largest aspect ratio. Processors that scale the shorter side to a fixed length turn 1 x 16,384 pixels into gigabytes."""
    max_scanned_pixels: Positive = 1_500_000_000
    """Most pixels to scan when decoding one image: its pixels times the scans of a JPEG. A run-length coded BMP counts as
    256 scans."""
    max_video_bytes: Positive = 32 << 20
    """Largest encoded video."""
    max_video_s: Positive = 3600
    """Longest video."""
    max_video_frames: Positive = 36_000
    """Most frames of one video."""
    max_video_pixels: Positive = 16_000_000_000
    """Most pixels of one video, over all frames."""
    max_audio_bytes: Positive = 25 << 20
    """Largest encoded audio clip."""
    max_audio_s: Positive = 1800
    """Longest audio clip."""
    max_audio_samples: Positive = 200_000_000
    """Most samples of one channel of audio."""

    def __post_init__(self) -> None:
        check_limits(self)


def inspect_media(data: bytes, limits: MediaLimits) -> MediaInfo:
    """Identify one image, video or audio clip and check it against the limits.

    ``width`` and ``height`` are in pixels after applying the orientation; a GIF is an image, of which the first frame
    counts. Hashing takes about a millisecond per megabyte and releases the GIL: call this from a thread pool.

    Raises InvalidMedia for an empty, too large, unknown or broken file.
    """
    if not data:
        raise InvalidMedia("the item is empty")
    _check_bytes("item", data, max(limits.max_image_bytes, limits.max_video_bytes, limits.max_audio_bytes))
    if (header := read_header(data)) is not None:
        _check_bytes(f"{header.format} image", data, limits.max_image_bytes)
        _check_size(f"the {header.format} image", header.width, header.height, limits)
        _check_passes(header, limits)
        return _image_info(header, data)
    clip = _read_clip(data)
    if clip.modality is Modality.VIDEO:
        _check_bytes(f"{clip.format} video", data, limits.max_video_bytes)
        _check_video(clip, limits)
        return _clip_info(clip, data)
    _check_bytes(f"{clip.format} audio", data, limits.max_audio_bytes)
    if clip.duration_s > limits.max_audio_s:
        raise InvalidMedia(
            f"the {clip.format} audio takes {clip.duration_s:.1f} s, the limit is {limits.max_audio_s} s"
        )
    if clip.samples > limits.max_audio_samples:
        raise InvalidMedia(
            f"the {clip.format} audio has {clip.samples} samples, the limit is {limits.max_audio_samples}"
        )
    return _clip_info(clip, data)


def _image_info(header: Header, data: bytes) -> MediaInfo:
    turned = header.orientation >= 5  # 5 to 8 swap the axes
    return MediaInfo(
        modality=Modality.IMAGE,
        format=header.format,
        width=header.height if turned else header.width,
        height=header.width if turned else header.height,
        nbytes=len(data),
        digest=digest_of(data),
    )


def _clip_info(clip: Clip, data: bytes) -> MediaInfo:
    turned = clip.rotation_deg in (90, 270)
    return MediaInfo(
        modality=clip.modality,
        format=clip.format,
        width=clip.height if turned else clip.width,
        height=clip.width if turned else clip.height,
        nbytes=len(data),
        digest=digest_of(data),
        frames=clip.frames,
        duration_s=clip.duration_s,
        samples=clip.samples,
        sample_rate_hz=clip.sample_rate_hz,
        rotation_deg=clip.rotation_deg,
    )


def _read_clip(data: bytes) -> Clip:
    name, reader = _clip_reader(data)
    try:
        return reader(data)
    except (struct.error, IndexError) as error:  # a read beyond the end
        raise InvalidMedia(f"the {name} file is cut off") from error


def _clip_reader(data: bytes) -> tuple[str, Callable[[bytes], Clip]]:
    """Choose by the first bytes; MP3 is tried last, since its are the least distinctive."""
    if name := unsupported_format(data):
        raise InvalidMedia(f"the item is {name}, which is not supported; accepted are {_KNOWN}")
    if is_wav(data):
        return "wav", read_wav
    if is_flac(data):
        return "flac", read_flac
    if data[:4] == b"OggS":
        return "ogg", read_ogg
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "webm", read_webm
    if is_mp4(data):
        return "mp4", read_mp4
    if is_mp3(data):
        return "mp3", read_mp3
    raise InvalidMedia(f"the item's format is not known; accepted are {_KNOWN}")


def _check_passes(header: Header, limits: MediaLimits) -> None:
    """Check the cost of decoding; a small image has a minimum per scan, which has a cost of its own."""
    pixels = header.width * header.height
    if (
        header.passes > 1
        and (scanned := header.passes * max(pixels, _LEAST_SCANNED_PIXELS)) > limits.max_scanned_pixels
    ):
        raise InvalidMedia(
            f"decoding the {header.format} image goes {header.passes} times over its {pixels} pixels, which counts as "
            f"{scanned} scanned pixels; the limit is {limits.max_scanned_pixels}"
        )


def _check_bytes(what: str, data: bytes, limit: int) -> None:
    if len(data) > limit:
        raise InvalidMedia(f"the {what} has {len(data)} bytes, the limit is {limit}")


def _check_video(clip: Clip, limits: MediaLimits) -> None:
    what = f"the {clip.format} video"
    _check_size(what, clip.width, clip.height, limits)
    if clip.frames < 1 or not clip.duration_s > 0:
        raise InvalidMedia(f"{what} has {clip.frames} frames over {clip.duration_s:.3f} s; it needs at least one frame")
    if clip.frames > limits.max_video_frames:
        raise InvalidMedia(f"{what} has {clip.frames} frames, the limit is {limits.max_video_frames}")
    if clip.duration_s > limits.max_video_s:
        raise InvalidMedia(f"{what} takes {clip.duration_s:.1f} s, the limit is {limits.max_video_s} s")
    if (pixels := clip.frames * clip.width * clip.height) > limits.max_video_pixels:
        raise InvalidMedia(f"{what} has {pixels} pixels in all its frames, the limit is {limits.max_video_pixels}")


def _check_size(what: str, width: int, height: int, limits: MediaLimits) -> None:
    size = f"{what} is {width} x {height} pixels"
    if min(width, height) < 1:
        raise InvalidMedia(f"{size}; it needs at least 1 x 1")
    if max(width, height) > limits.max_image_side_px:
        raise InvalidMedia(f"{size}; the longest side allowed is {limits.max_image_side_px}")
    if width * height > limits.max_image_pixels:
        raise InvalidMedia(f"{size}, {width * height} in all; the limit is {limits.max_image_pixels}")
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise InvalidMedia(f"{size}; the longer side may be at most {limits.max_aspect_ratio} times the shorter one")
