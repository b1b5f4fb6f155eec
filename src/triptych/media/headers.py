"""Headers of the accepted image formats: size, orientation and cost of decoding, parsed by hand.

The first bytes decide the format, and the rest must have its structure; names and declared types are ignored. Every
loop over a file's parts is bounded. ``read_header`` raises InvalidMedia only.

The orientation is read from EXIF, then from plain XMP. Compressed XMP and the textual EXIF profiles of old PNG writers
are not unpacked; where the orientation matters, the encoder's count decides.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import InvalidMedia

FORMATS = ("png", "jpeg", "webp", "gif", "bmp")

_MAX_PARTS = 65_536
"""Most chunks, segments or blocks of a file."""
_MAX_EXIF_SEGMENTS = 64
"""Most EXIF segments of a JPEG (4 MiB); decoders append them one by one, copying each time."""
_MAX_UNPACKED_BYTES = 64 << 20
"""Limit of a PNG's inflated metadata."""
_MAX_INFLATION = 1032
"""Largest expansion of deflate."""
_MAX_INFLATED_CHUNK_BYTES = 1 << 20
"""Pillow's own limit for a chunk of metadata."""
_COMPRESSED_METADATA = frozenset({b"iCCP", b"zTXt", b"iTXt"})
_RLE_PASSES = 256
"""Pillow decodes run-length BMP in Python: a pixel costs as much as this many passes of JPEG."""

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EXIF_PREFIX = b"Exif\x00\x00"
_XMP_PREFIX = b"http://ns.adobe.com/xap/1.0/\x00"
_XMP_KEYWORD = b"XML:com.adobe.xmp\x00"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_TIFF_BYTE_ORDERS = {b"II*\x00": "<", b"MM\x00*": ">"}
_ORIENTATION_TAG = 0x0112
_TIFF_INTEGERS = {3: "H", 4: "I", 8: "h", 9: "i"}

# Start-of-frame markers: all of 0xC0 to 0xCF but DHT (C4), JPG (C8) and DAC (CC). Lossless, hierarchical and
# arithmetic-coded images are refused: no browser shows them, and scans and pixels do not bound their cost.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_FRAMES_TAKEN = frozenset({0xC0, 0xC1, 0xC2})
_JPEG_PROGRESSIVE = 0xC2
_JPEG_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_JPEG_START_OF_SCAN, _JPEG_END, _JPEG_APP1 = 0xDA, 0xD9, 0xE1
_BMP_RUN_LENGTHS = (1, 2)
_JPEG_FILL = re.compile(rb"\xff*")


@dataclass(frozen=True, slots=True)
class Header:
    """Width and height are in pixels as stored; ``orientation`` is EXIF's, 1 to 8.

    ``passes`` bounds how often decoding visits all pixels.
    """

    format: str
    width: int
    height: int
    orientation: int = 1
    passes: int = 1


def read_header(data: bytes) -> Header | None:
    """The header of an image; None when its first bytes match no accepted format.

    Raises InvalidMedia when they match but the rest does not have the format's structure.
    """
    if data.startswith(_PNG_SIGNATURE):
        name, reader = "png", _read_png
    elif data.startswith(b"\xff\xd8\xff"):
        name, reader = "jpeg", _read_jpeg
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        name, reader = "webp", _read_webp
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        name, reader = "gif", _read_gif
    elif data[:2] == b"BM":
        name, reader = "bmp", _read_bmp
    else:
        return None
    try:
        return reader(data)
    except (struct.error, IndexError) as error:  # a read beyond the end
        raise InvalidMedia(f"the {name} image is cut off") from error


def _parts(format_name: str) -> Iterator[int]:
    """Count a file's parts up to the limit, then raise InvalidMedia."""
    yield from range(_MAX_PARTS)
    raise InvalidMedia(f"the {format_name} image has more than {_MAX_PARTS} parts")


def _read_png(data: bytes) -> Header:
    """Chunks of length, type, data, CRC (PNG specification, section 5.3); the first is IHDR, the last IEND."""
    if data[8:16] != b"\x00\x00\x00\rIHDR":
        raise InvalidMedia("the png image does not start with its header")
    width, height = struct.unpack_from(">II", data, 16)
    exif, xmp = b"", b""
    unpacked_nbytes = 0
    position = len(_PNG_SIGNATURE)
    for _ in _parts("png"):
        nbytes, kind = struct.unpack_from(">I4s", data, position)
        content = position + 8
        position = content + nbytes + 4
        if position > len(data):
            raise InvalidMedia("the png image is cut off")
        if kind in _COMPRESSED_METADATA:
            unpacked_nbytes += min(nbytes * _MAX_INFLATION, _MAX_INFLATED_CHUNK_BYTES)
            if unpacked_nbytes > _MAX_UNPACKED_BYTES:
                raise InvalidMedia(f"the png image's metadata may unpack to more than {_MAX_UNPACKED_BYTES} bytes")
        if kind == b"eXIf":
            exif = data[content : content + nbytes]
        elif kind == b"iTXt" and data.startswith(_XMP_KEYWORD, content):
            xmp = data[content : content + nbytes]
        elif kind == b"IEND":
            break
    return Header("png", width, height, _orientation(exif, xmp))


def _read_jpeg(data: bytes) -> Header:
    """Marker segments up to the first scan (ITU T.81, annex B); further scans are counted, not read."""
    frame: tuple[int, int, int] | None = None
    exif: list[bytes] = []
    xmp = b""
    components, progressive, passes = 0, False, 1
    for marker, segment, end in _jpeg_segments(data):
        if marker == _JPEG_START_OF_SCAN:
            if (
                progressive or segment[0] < components
            ):  # else a single scan has all components, and decoders stop after it
                passes += data.count(b"\xff\xda", end)
        elif marker in _JPEG_FRAMES:
            if marker not in _JPEG_FRAMES_TAKEN:
                raise InvalidMedia(
                    "the jpeg image is lossless, hierarchical or arithmetic-coded, which is not supported"
                )
            if frame is not None:
                raise InvalidMedia("the jpeg image has more than one frame header")
            frame = struct.unpack_from(">HHB", segment, 1)
            components, progressive = frame[2], marker == _JPEG_PROGRESSIVE
        elif marker == _JPEG_APP1 and segment.startswith(_EXIF_PREFIX):
            exif.append(segment[len(_EXIF_PREFIX) :])  # large EXIF data continues in the next segment
            if len(exif) > _MAX_EXIF_SEGMENTS:
                raise InvalidMedia(f"the jpeg image has more than {_MAX_EXIF_SEGMENTS} segments of EXIF data")
        elif marker == _JPEG_APP1 and segment.startswith(_XMP_PREFIX):
            xmp = segment
    if frame is None:
        raise InvalidMedia("the jpeg image has no frame header")
    height, width, _ = frame
    return Header("jpeg", width, height, _orientation(b"".join(exif), xmp), passes)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Marker, content and end of each segment, up to the header of the first scan."""
    position, fill_nbytes, marker = 2, 0, 0
    for _ in _parts("jpeg"):
        if marker == _JPEG_START_OF_SCAN:
            return
        if data[position] != 0xFF:
            raise InvalidMedia("the jpeg image has no marker where one has to be")
        end_of_fill = _JPEG_FILL.match(data, position).end()  # type: ignore[union-attr]  # the pattern also matches the empty string
        fill_nbytes += end_of_fill - position
        if fill_nbytes > 2 * _MAX_PARTS:  # decoders skip them one by one
            raise InvalidMedia(f"the jpeg image has more than {2 * _MAX_PARTS} fill bytes")
        marker = data[end_of_fill]
        position = end_of_fill + 1
        if marker == _JPEG_END:
            return
        if marker not in _JPEG_STANDALONE:
            nbytes = int(struct.unpack_from(">H", data, position)[0])
            segment = data[position + 2 : position + nbytes]
            if nbytes < 2 or len(segment) != nbytes - 2:
                raise InvalidMedia("the jpeg image is cut off")
            position += nbytes
            yield marker, segment, position


def _read_webp(data: bytes) -> Header:
    """RIFF chunks; the first is VP8, VP8L or VP8X (RFC 9649, section 2)."""
    end = 8 + int(struct.unpack_from("<I", data, 4)[0])
    if end > len(data):
        raise InvalidMedia("the webp image is cut off")
    size: tuple[int, int] | None = None
    exif, xmp = b"", b""
    position = 12
    for _ in _parts("webp"):
        if position + 8 > end:
            break
        kind, nbytes = struct.unpack_from("<4sI", data, position)
        content = position + 8
        position = content + nbytes + nbytes % 2
        if content + nbytes > end:
            raise InvalidMedia("the webp image is cut off")
        if size is None:
            size = _webp_size(data, kind, content)
        elif kind == b"EXIF":
            exif = data[content : content + nbytes]
        elif kind == b"XMP ":
            xmp = data[content : content + nbytes]
    if size is None:
        raise InvalidMedia("the webp image has no image data")
    return Header("webp", *size, _orientation(exif.removeprefix(_EXIF_PREFIX), xmp))


def _webp_size(data: bytes, kind: bytes, content: int) -> tuple[int, int]:
    if kind == b"VP8 " and data[content + 3 : content + 6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, content + 6)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and data[content] == 0x2F:
        bits = int(struct.unpack_from("<I", data, content + 1)[0])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", data, content + 4)
        return (high_width << 16 | low_width) + 1, (high_height << 16 | low_height) + 1
    raise InvalidMedia("the webp image does not start with its header")


def _read_gif(data: bytes) -> Header:
    """The logical screen, or the first frame where that reaches beyond it (GIF89a, sections 18 and 20)."""
    screen_width, screen_height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + _gif_palette_nbytes(flags)
    parts = _parts("gif")
    for _ in parts:
        if data[position] == 0x2C:
            left, top, width, height = struct.unpack_from("<HHHH", data, position + 1)
            return Header("gif", max(screen_width, left + width), max(screen_height, top + height))
        if data[position] != 0x21:
            raise InvalidMedia("the gif image has no frame where one has to be")
        position += 2  # an extension: its label, then blocks of a length byte and data up to an empty one
        for _ in parts:
            nbytes = data[position]
            position += 1 + nbytes
            if nbytes == 0:
                break
    raise AssertionError


def _gif_palette_nbytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _read_bmp(data: bytes) -> Header:
    """The OS/2 core header or one of the Windows headers; a negative height stores rows from the top."""
    passes = 1
    header_nbytes = int(struct.unpack_from("<I", data, 14)[0])
    if header_nbytes == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    elif header_nbytes in (40, 52, 56, 64, 108, 124):
        width, height, _, _, compression = struct.unpack_from("<iiHHI", data, 18)
        height = abs(height)
        if compression in _BMP_RUN_LENGTHS:
            passes = _RLE_PASSES * max(1, -(-len(data) // max(1, width * height)))
    else:
        raise InvalidMedia(f"the bmp image has a header of {header_nbytes} bytes, which is none that is known")
    return Header("bmp", width, height, passes=passes)


def _orientation(exif: bytes, xmp: bytes) -> int:
    """EXIF's orientation, else XMP's, else 1; broken metadata is ignored, as usual."""
    found = _exif_orientation(exif)
    if found is None and (match := _XMP_ORIENTATION.search(xmp)):
        found = int(match[1])
    return found if found is not None and 1 <= found <= 8 else 1


def _exif_orientation(exif: bytes) -> int | None:
    """The orientation field of the first directory of a TIFF structure (TIFF 6.0, section 2)."""
    order = _TIFF_BYTE_ORDERS.get(exif[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, start)
        for entry in range(entries):
            place = start + 2 + 12 * entry
            tag, kind, count = struct.unpack_from(order + "HHI", exif, place)
            if tag == _ORIENTATION_TAG and count == 1 and kind in _TIFF_INTEGERS:
                return int(struct.unpack_from(order + _TIFF_INTEGERS[kind], exif, place + 8)[0])
    except struct.error:
        return None
    return None
