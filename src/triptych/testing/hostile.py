"""Small, valid files that are costly to decode, for tests of limits."""

import struct
import zlib

_JPEG_END = b"\xff\xd9"
_REFINES_AC = b"\xff\xda" + struct.pack(">HBBBBBB", 8, 1, 1, 0, 1, 63, 0x10)
"""A scan that refines coefficients 1 to 63 by one bit but has no data: all stay unchanged."""


def jpeg_of_many_scans(width: int, height: int, *, scans: int, progressive: bool = True) -> bytes:
    """A single-colour JPEG with ``scans`` scans that change nothing; grey if progressive."""
    frame = 0xC2 if progressive else 0xC0
    zeros = b"\xff\xdb" + struct.pack(">HB", 67, 0) + b"\1" * 64
    header = b"\xff" + struct.pack(">BHBHHB3B", frame, 11, 8, height, width, 1, 1, 0x11, 0)
    if not progressive:  # three components in separate scans
        components = (1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0)
        header = b"\xff" + struct.pack(">BHBHHB9B", frame, 17, 8, height, width, 3, *components)
    tables = b"".join(
        b"\xff\xc4" + struct.pack(">HB", 20, kind) + b"\1" + bytes(15) + b"\0" for kind in (0x00, 0x10)
    )  # one code of one bit, for "nothing"
    first = b"\xff\xda" + struct.pack(">HBBBBBB", 8, 1, 1, 0, 0, 0 if progressive else 63, 1 if progressive else 0)
    return b"\xff\xd8" + zeros + header + tables + first + (_REFINES_AC if progressive else first) * scans + _JPEG_END


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunks(png: bytes, chunks: bytes) -> bytes:
    """A PNG with additional chunks before its pixels."""
    place = png.index(b"IDAT") - 4
    return png[:place] + chunks + png[place:]
