"""What an image is, from its bytes alone: format, size and digest, without decoding a pixel.

Headers are read here rather than by an imaging library, so that the process that takes requests never hands untrusted
bytes to a decoder. A file whose header is sound but whose pixels are not is found by the encoder.
"""

from dataclasses import dataclass
from hashlib import blake2b

from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia
from triptych.media.headers import FORMATS, Header, read_header

DIGEST_NBYTES = 32


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """The most that one image may be.

    ``max_pixels`` bounds decoded memory: 64 million are 192 MB as RGB. ``max_aspect_ratio`` bounds what comes after:
    processors that bring the shorter side to a fixed length would make gigabytes of an image of 1 x 16,384.
    """

    max_bytes: int = 20 * 1024 * 1024
    max_pixels: int = 64_000_000
    max_side_px: int = 16_384
    max_aspect_ratio: int = 200

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels", "max_side_px", "max_aspect_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it has to be at least 1")


def inspect_image(data: bytes, limits: MediaLimits) -> MediaInfo:
    """Identify one image and check it against the limits.

    ``width`` and ``height`` are in pixels with the EXIF orientation applied; of an animation, the first frame counts.
    Hashing takes about a millisecond per megabyte and releases the interpreter lock: call this from a pool.

    Raises InvalidMedia for an empty, too large, unknown or broken file.
    """
    if not data:
        raise InvalidMedia("the image is empty")
    if len(data) > limits.max_bytes:
        raise InvalidMedia(f"the image has {len(data)} bytes, the limit is {limits.max_bytes}")
    header = read_header(data)
    if header is None:
        raise InvalidMedia(f"the image's format is not known; accepted are {', '.join(FORMATS)}")
    _check_size(header, limits)
    turned = header.orientation >= 5  # 5 to 8 exchange the axes
    return MediaInfo(
        modality=Modality.IMAGE,
        format=header.format,
        width=header.height if turned else header.width,
        height=header.width if turned else header.height,
        nbytes=len(data),
        digest=blake2b(data, digest_size=DIGEST_NBYTES).digest(),
    )


def _check_size(header: Header, limits: MediaLimits) -> None:
    size = f"the {header.format} image is {header.width} x {header.height} pixels"
    if min(header.width, header.height) < 1:
        raise InvalidMedia(f"{size}; it needs at least 1 x 1")
    if max(header.width, header.height) > limits.max_side_px:
        raise InvalidMedia(f"{size}; the longest side allowed is {limits.max_side_px}")
    if header.width * header.height > limits.max_pixels:
        raise InvalidMedia(f"{size}, {header.width * header.height} in all; the limit is {limits.max_pixels}")
    if max(header.width, header.height) > limits.max_aspect_ratio * min(header.width, header.height):
        raise InvalidMedia(f"{size}; the longer side may be at most {limits.max_aspect_ratio} times the shorter one")
