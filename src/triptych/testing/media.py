"""Generated valid images for tests."""

import struct
import zlib
from random import Random


def png(width: int, height: int, *, seed: int = 0) -> bytes:
    """A valid 8-bit greyscale PNG; its content depends on ``seed`` alone."""
    noise = Random(seed)  # noqa: S311  # not for secrets
    rows = b"".join(b"\0" + noise.randbytes(width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 1)) + _chunk(b"IEND", b"")
    )


def png_header(width: int, height: int) -> bytes:
    """The start of a PNG that declares this size but has no pixels."""
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))


def png_outline(width: int, height: int, mark: bytes) -> bytes:
    """A PNG of this size that passes inspection but has no pixels, for engines that decode nothing; unique by ``mark``."""
    return png_header(width, height) + _chunk(b"tEXt", b"mark\0" + mark) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
