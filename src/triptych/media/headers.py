"""Headers of the accepted image formats: size, orientation and cost of decoding, parsed by hand.

The first bytes decide the format, and the rest must have its structure; names and declared types are ignored. Every
loop over a file's parts is bounded. ``read_header`` raises InvalidMedia only.

The orientation is read from EXIF, then from plain XMP. Compressed XMP and the textual EXIF profiles of old PNG writers
are not unpacked. Metadata that cannot be read is ignored: this module alone reads it, for routers and for decoders, and
``without_metadata`` is what decoders get.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import InvalidMedia

FORMATS = ("png", "jpeg", "webp", "gif", "bmp")

_MAX_PARTS = 65_536
"""Most chunks, segments or blocks of a file."""
_PNG_PIXELS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
"""The chunks that pixels depend on."""
_RLE_PASSES = 256
"""Pillow decodes run-length BMP in Python: a pixel costs as much as this many passes of JPEG."""

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EXIF_PREFIX = b"Exif\x00\x00"
_EXIF_PREFIXES = re.compile(rb"(?:Exif\x00\x00){0,8}")
"""Some writers repeat it."""
_XMP_PREFIX = b"http://ns.adobe.com/xap/1.0/\x00"
_XMP_KEYWORD = b"XML:com.adobe.xmp\x00"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_TIFF_BYTE_ORDERS = {b"II*\x00": "<", b"MM\x00*": ">"}
_ORIENTATION_TAG = 0x0112
_TIFF_INTEGERS = {3: ("H", 2), 4: ("I", 1), 8: ("h", 2), 9: ("i", 1)}
"""By type: the first value's form, and how many values a field holds itself."""

# Start-of-frame markers: all of 0xC0 to 0xCF but DHT (C4), JPG (C8) and DAC (CC). Lossless, hierarchical and
# arithmetic-coded images are refused: no browser shows them, and scans and pixels do not bound their cost.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_FRAMES_TAKEN = frozenset({0xC0, 0xC1, 0xC2})
_JPEG_PROGRESSIVE = 0xC2
_JPEG_STANDALONE = frozenset({0x00, 0x01, *range(0xD0, 0xD8)})
_JPEG_START_OF_SCAN, _JPEG_END, _JPEG_APP1 = 0xDA, 0xD9, 0xE1
_JPEG_METADATA = frozenset({*range(0xE0, 0xF0), 0xFE})
_JPEG_COLOURS = {0xE0: (b"JFIF\x00", 14), 0xEE: (b"Adobe", 12)}
"""The application segments that colours depend on: how they begin, and the bytes below which decoders ignore them."""
_JPEG_FILL = re.compile(rb"[^\xff]*\xff*")
"""Decoders skip bytes between segments, and any number of bytes 0xFF in front of a marker."""
_BMP_RUN_LENGTHS = (1, 2)


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


def without_metadata(data: bytes) -> bytes:
    """The image with what its pixels depend on only, where others' readers fail on metadata: PNG and JPEG.

    Other images are returned as they are. Raises InvalidMedia as ``read_header``, which has to accept ``data`` first.
    """
    if data.startswith(_PNG_SIGNATURE):
        kept = [chunk for kind, chunk in _png_chunks(data) if kind in _PNG_PIXELS]
        return b"".join([_PNG_SIGNATURE, *kept])
    if not data.startswith(b"\xff\xd8"):
        return data
    pieces, start_of_pixels = [data[:2]], 2
    for marker, segment, end in _jpeg_segments(data):
        if marker not in _JPEG_METADATA or _decides_on_colours(marker, segment):
            pieces.append(struct.pack(">BBH", 0xFF, marker, len(segment) + 2) + segment)
        start_of_pixels = end
    return b"".join([*pieces, data[start_of_pixels:]])


def _decides_on_colours(marker: int, segment: bytes) -> bool:
    begins, least_nbytes = _JPEG_COLOURS.get(marker, (b"", 1 << 16))
    return segment.startswith(begins) and len(segment) >= least_nbytes


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
    for kind, chunk in _png_chunks(data):
        if kind == b"eXIf":
            exif = bytes(chunk[8:-4])
        elif kind == b"iTXt" and (text := bytes(chunk[8:-4])).startswith(_XMP_KEYWORD):
            xmp = text
    return Header("png", width, height, _orientation(exif, xmp))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Kind and bytes of each chunk, from its length to its checksum, up to IEND."""
    view, position = memoryview(data), len(_PNG_SIGNATURE)
    for _ in _parts("png"):
        nbytes, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + nbytes
        if end > len(data):
            raise InvalidMedia("the png image is cut off")
        yield kind, view[position:end]
        if kind == b"IEND":
            return
        position = end


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
        end_of_fill = _JPEG_FILL.match(data, position).end()  # type: ignore[union-attr]  # the pattern also matches the empty string
        fill_nbytes += end_of_fill - position
        if fill_nbytes > 2 * _MAX_PARTS:  # decoders skip them one by one
            raise InvalidMedia(f"the jpeg image has more than {2 * _MAX_PARTS} bytes between its segments")
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
    return Header("webp", *size, _orientation(exif, xmp))


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
        if data[position] == 0x3B:
            raise InvalidMedia("the gif image has no frame")
        if data[position] != 0x21:  # decoders skip what begins no part
            position += 1
            continue
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
    orientation = _exif_orientation(exif)
    if orientation is None and (match := _XMP_ORIENTATION.search(xmp)):
        orientation = int(match[1])
    return orientation if orientation is not None and 1 <= orientation <= 8 else 1


def _exif_orientation(exif: bytes) -> int | None:
    """The orientation field of the first directory of a TIFF structure (TIFF 6.0, section 2)."""
    exif = exif[_EXIF_PREFIXES.match(exif).end() :]  # type: ignore[union-attr]  # the pattern also matches the empty string
    order = _TIFF_BYTE_ORDERS.get(exif[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, start)
        for entry in range(entries):
            place = start + 2 + 12 * entry
            tag, kind, count = struct.unpack_from(order + "HHI", exif, place)
            form, most = _TIFF_INTEGERS.get(kind, ("", 0))
            if tag == _ORIENTATION_TAG and 1 <= count <= most:
                return int(struct.unpack_from(order + form, exif, place + 8)[0])
    except struct.error:
        return None
    return None
