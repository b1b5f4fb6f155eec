"""Decodes untrusted images to upright RGB.

docs/models.md describes each conversion. Gamma and colour profiles are not applied, as is usual: vision encoders were
trained without them.
"""

import struct
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia
from triptych.media.headers import read_header, without_metadata

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that Pillow may decode, in its names; each image only as the format found by its header."""

Pixels = npt.NDArray[np.uint8]
"""[height, width, 3]."""

_WHITE = (255, 255, 255, 255)
_OPAQUE = frozenset({"1", "L", "P", "RGB", "CMYK"})
_WITH_ALPHA = frozenset({"LA", "PA", "RGBA"})
_SIXTEEN_BITS = frozenset({"I;16", "I;16L", "I;16B", "I"})
_BAND_PIXELS = 1 << 20
"""Pixels converted at a time, which bounds intermediate memory."""

_UPRIGHT: dict[int, Callable[[Pixels], Pixels]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels.transpose(1, 0, 2)[:, ::-1],
    7: lambda pixels: pixels.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda pixels: pixels.transpose(1, 0, 2)[::-1],
}
"""Functions that turn an image upright, by EXIF orientation."""


def decode_image(media: bytes, info: MediaInfo) -> Pixels:
    """The first frame, upright (EXIF orientation applied), in RGB over white.

    ``info`` is the header against which all limits were checked, so an image that opens with another size is refused
    before its pixels are decoded. Its metadata is read as the router reads it, and never by Pillow. Raises
    InvalidMedia; its text never quotes the decoder.
    """
    name = info.format.upper()
    if info.modality is not Modality.IMAGE or name not in FORMATS:
        raise InvalidMedia(f"{info.modality.value} of format {info.format!r} is not supported")
    header = read_header(media)
    if header is None or header.format != info.format:
        raise InvalidMedia(f"the {info.format} image cannot be decoded")
    try:
        image: Image.Image = Image.open(BytesIO(without_metadata(media)), formats=(name,))
        width, height = image.size
        if (width, height) in ((info.width, info.height), (info.height, info.width)):
            image.load()
            pixels = to_rgb(image, info.format, *_png_depth(media, info.format))
            if header.orientation in _UPRIGHT:
                pixels = _UPRIGHT[header.orientation](pixels)
            height, width = pixels.shape[:2]
    except (InvalidMedia, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise many types
        raise InvalidMedia(f"the {info.format} image cannot be decoded") from error
    if (width, height) != (info.width, info.height):
        raise InvalidMedia(f"the image is {width}x{height}, its header says {info.width}x{info.height}")
    return np.ascontiguousarray(pixels)


def to_rgb(image: Image.Image, form: str, bits: int = 8) -> Pixels:
    """A loaded image as 8-bit RGB over white. ``bits`` are those of a stored sample.

    Raises InvalidMedia for an unsupported mode.
    """
    transparency = image.info.get("transparency")
    if image.mode in _SIXTEEN_BITS:
        return _sixteen_bits(image, form, transparency)
    if image.mode not in _OPAQUE | _WITH_ALPHA:
        raise InvalidMedia(f"the {form} image has pixels of mode {image.mode}, which is not supported")
    if image.mode == "RGB" and transparency is not None and bits == 16:
        raise InvalidMedia(f"the {form} image has 16 bits per colour and a transparent one, which is not supported")
    if image.mode == "L" and transparency is not None:  # Pillow scales samples of fewer bits, but not this
        image.info["transparency"] = transparency % (1 << bits) * 255 // ((1 << bits) - 1)
    elif image.mode == "RGB" and transparency is not None:
        image.info["transparency"] = tuple(value % 256 for value in transparency)
    over_white = image.mode in _WITH_ALPHA or transparency is not None
    pixels = np.empty((image.height, image.width, 3), dtype=np.uint8)
    for begin, end in _bands(image):
        whole = (begin, end) == (0, image.height)
        band = image if whole else image.crop((0, begin, image.width, end))
        if over_white:
            band = Image.alpha_composite(Image.new("RGBA", band.size, _WHITE), band.convert("RGBA"))
        pixels[begin:end] = np.asarray(band.convert("RGB"))
    return pixels


def _sixteen_bits(image: Image.Image, form: str, transparency: Any) -> Pixels:
    """16-bit grey: the high byte of each value, as for colours."""
    pixels = np.empty((image.height, image.width, 3), dtype=np.uint8)
    for begin, end in _bands(image):
        values = np.asarray(image.crop((0, begin, image.width, end)))
        if values.dtype != np.uint16 and (values.min() < 0 or values.max() > 0xFFFF):
            raise InvalidMedia(f"the {form} image has values of more than 16 bits, which are not supported")
        grey = (values >> 8).astype(np.uint8)
        if transparency is not None:
            grey[values == transparency] = 255
        pixels[begin:end] = grey[..., None]
    return pixels


def _bands(image: Image.Image) -> Iterator[tuple[int, int]]:
    """Start and end rows of bands of the image, in order."""
    rows = max(1, _BAND_PIXELS // image.width)
    return ((begin, min(begin + rows, image.height)) for begin in range(0, image.height, rows))


def _png_depth(media: bytes, form: str) -> tuple[int, ...]:
    """Bits per sample, which Pillow does not report."""
    return struct.unpack_from("B", media, 24) if form == "png" else ()
