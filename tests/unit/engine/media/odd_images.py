"""Odd images: what cameras, editors and other writers make."""

import struct
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from io import BytesIO
from random import Random
from typing import Any

from PIL import Image

from triptych.testing.hostile import chunk

Make = Callable[[], bytes]
"""Makes a file."""

WIDTH, HEIGHT = 23, 17
TURNED = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0" + bytes(4)
"""A TIFF structure with the orientation 6: a quarter turn."""
ODD_EXIF = {
    "one byte": b"\x01",
    "no byte": b"",
    "no TIFF": b"nonsense that is no TIFF structure",
    "a cut off header": b"MM\0*\0",
    "a directory beyond its end": b"II*\0\xff\xff\xff\xff",
    "a directory that is cut off": TURNED[:20],
    "a turn": TURNED,
    "a turn, big-endian": b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x08\0\0" + bytes(4),
    "a turn and no end of its directory": TURNED[:-4],
    "a turn after its prefix": b"Exif\0\0" + TURNED,
    "a turn as a byte": TURNED.replace(b"\x12\x01\x03\0", b"\x12\x01\x01\0"),
    "a turn as a fraction": TURNED.replace(b"\x12\x01\x03\0", b"\x12\x01\x05\0"),
    "a turn as text": TURNED.replace(b"\x12\x01\x03\0\x01\0\0\0\x06", b"\x12\x01\x02\0\x02\0\0\x006"),
    "two turns in a field": TURNED.replace(b"\x03\0\x01", b"\x03\0\x02"),
    "turns in three fields": b"II*\0\x08\0\0\0\x03\0"
    + b"".join(TURNED[10:18] + bytes((n, 0, 0, 0)) for n in (3, 6, 8)),
    "a BigTIFF": b"II+\0\x08\0\0\0" + bytes(24),
    "a turn beyond eight": TURNED.replace(b"\x06", b"\x63"),
}


def photo(mode: str = "RGB", size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    return Image.frombytes("RGB", size, Random(0).randbytes(3 * size[0] * size[1])).convert(mode)


def saved(form: str, mode: str = "RGB", size: tuple[int, int] = (WIDTH, HEIGHT), **options: object) -> bytes:
    out = BytesIO()
    photo(mode, size).save(out, form, **options)
    return out.getvalue()


def inserted(data: bytes, before: bytes, part: bytes, offset: int = 0) -> bytes:
    place = data.index(before) + offset
    return data[:place] + part + data[place:]


# --- PNG -------------------------------------------------------------------------------------------------------------


def png(
    bits: int = 8, kind: int = 2, *, interlaced: bool = False, chunks: bytes = b"", after: bytes = b"", pieces: int = 1
) -> bytes:
    """A PNG of random samples, by its colour type; ``chunks`` come before and ``after`` behind the pixels."""
    samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    noise = Random(bits * 8 + kind)
    rows = b""
    for left, top, step_x, step_y in passes:
        width, height = -(-(WIDTH - left) // step_x), -(-(HEIGHT - top) // step_y)
        rows += b"".join(b"\0" + noise.randbytes(-(-width * samples * bits // 8)) for _ in range(height))
    packed = zlib.compress(rows)
    step = -(-len(packed) // pieces)
    palette = chunk(b"PLTE", noise.randbytes(3 << bits)) if kind == 3 else b""
    pixels = b"".join(chunk(b"IDAT", packed[at : at + step]) for at in range(0, len(packed), step))
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, bits, kind, 0, 0, interlaced)
    parts = (chunk(b"IHDR", header), palette, chunks, pixels, after, chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _text(kind: bytes, keyword: bytes, text: bytes, *, packed: bool = False) -> bytes:
    if kind == b"tEXt":
        return chunk(kind, keyword + b"\0" + text)
    if kind == b"zTXt":
        return chunk(kind, keyword + b"\0\0" + zlib.compress(text))
    return chunk(kind, keyword + b"\0" + bytes((packed, 0, 0, 0)) + (zlib.compress(text) if packed else text))


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
_XMP_KEYWORD = b"XML:com.adobe.xmp"
_ANCILLARY = {
    "cHRM": chunk(b"cHRM", struct.pack(">8I", *range(1, 9))),
    "gAMA": chunk(b"gAMA", struct.pack(">I", 45_455)),
    "gAMA of nothing": chunk(b"gAMA", b""),
    "gAMA of zero": chunk(b"gAMA", bytes(4)),
    "iCCP": chunk(b"iCCP", b"name\0\0" + zlib.compress(bytes(200))),
    "iCCP that does not inflate": chunk(b"iCCP", b"name\0\0nonsense"),
    "iCCP without a name": chunk(b"iCCP", b""),
    "sBIT": chunk(b"sBIT", b"\5\6\5"),
    "sRGB": chunk(b"sRGB", b"\0"),
    "sRGB of nothing": chunk(b"sRGB", b""),
    "cICP": chunk(b"cICP", b"\x09\x10\0\1"),
    "mDCV": chunk(b"mDCV", bytes(24)),
    "cLLI": chunk(b"cLLI", bytes(8)),
    "tEXt": _text(b"tEXt", b"Comment", b"made by hand"),
    "tEXt without a keyword": chunk(b"tEXt", b""),
    "zTXt": _text(b"zTXt", b"Comment", b"made by hand"),
    "zTXt that does not inflate": chunk(b"zTXt", b"Comment\0\0nonsense"),
    "zTXt of an unknown method": chunk(b"zTXt", b"Comment\0\7" + zlib.compress(b"text")),
    "iTXt": _text(b"iTXt", b"Comment", "Gr\u00f6\u00dfe".encode()),
    "iTXt that is no UTF-8": _text(b"iTXt", b"Comment", b"\xff\xfe\xfd"),
    "iTXt cut off": chunk(b"iTXt", b"Comment"),
    "XMP with a turn": _text(b"iTXt", _XMP_KEYWORD, XMP),
    "bKGD": chunk(b"bKGD", bytes(6)),
    "hIST": chunk(b"hIST", bytes(8)),
    "tRNS": chunk(b"tRNS", bytes(6)),
    "pHYs": chunk(b"pHYs", struct.pack(">IIB", 2835, 2835, 1)),
    "pHYs of nothing": chunk(b"pHYs", b""),
    "sPLT": chunk(b"sPLT", b"name\0\x08" + bytes(6)),
    "tIME": chunk(b"tIME", b"\7\xea\1\1\0\0\0"),
    "dSIG": chunk(b"dSIG", b"\1\2\3"),
    "vpAg": chunk(b"vpAg", bytes(9)),
    "a private chunk": chunk(b"prVt", b"anything"),
    "iDOT, by a Mac": chunk(b"iDOT", bytes(28)),
    "caBX, signed": chunk(b"caBX", bytes(60)),
    "acTL, by an animation": chunk(b"acTL", struct.pack(">II", 1, 0))
    + chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, WIDTH, HEIGHT, 0, 0, 1, 10, 0, 0)),
    "a wrong checksum": chunk(b"tEXt", b"Comment\0x")[:-4] + b"\0\0\0\0",
}


def _png_files() -> Iterable[tuple[str, Make]]:
    depths = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
    for kind, bits in ((kind, bits) for kind, choices in depths.items() for bits in choices):
        yield f"png type {kind} of {bits} bits", partial(png, bits, kind)
        yield f"png type {kind} of {bits} bits, interlaced", partial(png, bits, kind, interlaced=True)
    for name, part in _ANCILLARY.items():
        yield f"png with {name}", partial(png, chunks=part)
        if name not in ("tRNS", "acTL, by an animation"):
            yield f"png with {name} after its pixels", partial(png, after=part)
    for name, exif in ODD_EXIF.items():
        yield f"png with EXIF of {name}", partial(png, chunks=chunk(b"eXIf", exif))
        yield f"png with EXIF of {name} after its pixels", partial(png, after=chunk(b"eXIf", exif))
    yield "png with EXIF twice", lambda: png(chunks=chunk(b"eXIf", b"\1") + chunk(b"eXIf", TURNED))
    yield (
        "png with EXIF and XMP that disagree",
        lambda: png(chunks=chunk(b"eXIf", TURNED.replace(b"\x06", b"\x03")) + _text(b"iTXt", _XMP_KEYWORD, XMP)),
    )
    yield (
        "png with EXIF that cannot be read and XMP",
        lambda: png(chunks=chunk(b"eXIf", b"\1") + _text(b"iTXt", _XMP_KEYWORD, XMP)),
    )
    yield "png in many pieces", lambda: png(pieces=40)
    yield "png with an empty piece", lambda: png(chunks=chunk(b"IDAT", b""))
    yield "png with bytes behind its end", lambda: png() + b"and more" * 9
    yield "png by an animation of two frames", lambda: saved("png", save_all=True, append_images=[photo().rotate(180)])


# --- JPEG ------------------------------------------------------------------------------------------------------------


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content


def jpeg_with(*segments: bytes, data: bytes | None = None) -> bytes:
    """A JPEG with these segments at its start, without the JFIF segment that Pillow writes."""
    data = data if data is not None else saved("jpeg")
    return data[:2] + b"".join(segments) + data[20:]


JFIF = segment(0xE0, b"JFIF\0\1\1\1" + struct.pack(">HHBB", 72, 72, 0, 0))
_APP_SEGMENTS = {
    "JFIF without a unit": segment(0xE0, b"JFIF\0\1\2\0" + struct.pack(">HHBB", 1, 1, 0, 0)),
    "JFIF cut off": segment(0xE0, b"JFIF\0\1"),
    "JFIF and a thumbnail": segment(0xE0, b"JFIF\0\1\2\1" + struct.pack(">HHBB", 72, 72, 2, 2) + bytes(12)),
    "JFXX": JFIF + segment(0xE0, b"JFXX\0\x13\1\1" + bytes(3)),
    "a comment": segment(0xFE, b"made by hand"),
    "an empty comment": segment(0xFE, b""),
    "Photoshop's resources": segment(0xED, b"Photoshop 3.0\x008BIM\x04\x04\0\0\0\0\0\2\x1c\x02"),
    "Photoshop's resources cut off": segment(0xED, b"Photoshop 3.0\x008BIM\x03\xed\0\0\0\0\0\x10\0"),
    "ICC in two segments": segment(0xE2, b"ICC_PROFILE\0\1\2" + bytes(60))
    + segment(0xE2, b"ICC_PROFILE\0\2\2" + bytes(9)),
    "ICC of which a segment is missing": segment(0xE2, b"ICC_PROFILE\0\2\3" + bytes(60)),
    "ICC cut off": segment(0xE2, b"ICC_PROFILE\0"),
    "FlashPix": segment(0xE2, b"FPXR\0\1" + bytes(9)),
    "MPF that cannot be read": segment(0xE2, b"MPF\0nonsense"),
    "MPF of one image": segment(0xE2, b"MPF\0II*\0\x08\0\0\0\1\0\1\xb0\4\0\1\0\0\0\1\0\0\0" + bytes(4)),
    "Adobe cut off": segment(0xEE, b"Adobe\0"),
    "Ducky": segment(0xEC, b"Ducky\0\1\0\4\0\0\0\x3c"),
    "XMP with a turn": segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + XMP),
    "extended XMP": segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + bytes(40)),
    "APP1 of nothing": segment(0xE1, b""),
    "APP15": segment(0xEF, b"anything"),
    "C2PA": segment(0xEB, b"JP\0\1" + bytes(40)),
    "a restart interval of zero": segment(0xDD, b"\0\0"),
}


def jpeg_of_restarts(interval: int) -> bytes:
    return saved("jpeg", size=(64, 48), restart_marker_blocks=interval)


def filled_jpeg() -> bytes:
    """With fill bytes before each marker of its header."""
    data, out, position = saved("jpeg"), b"\xff\xd8", 2
    while data[position + 1] != 0xDA:
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        out += b"\xff\xff\xff" + data[position:end]
        position = end
    return out + data[position:]


def _jpeg_files() -> Iterable[tuple[str, Make]]:
    for mode in ("L", "RGB", "CMYK"):
        for progressive in (False, True):
            name = f"jpeg in {mode}" + (", progressive" if progressive else "")
            yield name, partial(saved, "jpeg", mode, progressive=progressive)
    for sampling in ("4:4:4", "4:2:2", "4:2:0", "keep"):
        if sampling != "keep":
            yield f"jpeg sampled {sampling}", partial(saved, "jpeg", subsampling=sampling)
    yield "jpeg sampled 4:1:1", lambda: saved("jpeg", subsampling=2)
    for interval in (1, 7):
        yield f"jpeg that restarts every {interval} blocks", partial(jpeg_of_restarts, interval)
    for name, part in _APP_SEGMENTS.items():
        yield f"jpeg with {name}", partial(jpeg_with, part)
    for name, exif in ODD_EXIF.items():
        part = segment(0xE1, b"Exif\0\0" + exif)
        yield f"jpeg with EXIF of {name}", partial(jpeg_with, part)
        yield f"jpeg with JFIF and EXIF of {name}", partial(jpeg_with, JFIF, part)
        yield f"jpeg with EXIF of {name} before JFIF", partial(jpeg_with, part, JFIF)
    turned = segment(0xE1, b"Exif\0\0" + TURNED)
    yield "jpeg with EXIF twice", lambda: jpeg_with(turned, turned)
    yield (
        "jpeg with EXIF in two segments",
        lambda: jpeg_with(segment(0xE1, b"Exif\0\0" + TURNED[:18]), segment(0xE1, b"Exif\0\0" + TURNED[18:])),
    )
    yield "jpeg with EXIF of an odd prefix", lambda: jpeg_with(segment(0xE1, b"Exif\0\xff" + TURNED))
    yield (
        "jpeg with EXIF and XMP that disagree",
        lambda: jpeg_with(
            segment(0xE1, b"Exif\0\0" + TURNED.replace(b"\x06", b"\x03")), _APP_SEGMENTS["XMP with a turn"]
        ),
    )
    yield (
        "jpeg with EXIF that cannot be read and XMP",
        lambda: jpeg_with(segment(0xE1, b"Exif\0\0\1"), _APP_SEGMENTS["XMP with a turn"]),
    )
    yield "jpeg with EXIF after its frame header", lambda: inserted(saved("jpeg"), b"\xff\xc4", turned)
    yield "jpeg with fill bytes", filled_jpeg
    yield "jpeg with bytes behind its end", lambda: saved("jpeg") + b"and more" * 9
    yield "jpeg without its end", lambda: saved("jpeg")[:-2]
    yield "jpeg with bytes between its segments", lambda: jpeg_with(JFIF, b"\0\0\0")
    yield "jpeg of two images", lambda: saved("jpeg") + saved("jpeg", size=(9, 9))
    yield "jpeg with two tables in a segment", lambda: saved("jpeg", optimize=True)
    yield "jpeg of a scan per component", lambda: saved("jpeg", progressive=True, subsampling=0)
    yield "mpo of two images", lambda: saved("mpo", save_all=True, append_images=[photo().rotate(180)])


# --- WebP, GIF, BMP ----------------------------------------------------------------------------------------------------


def riff(kind: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    content = kind + b"".join(
        name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for name, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(content)) + content


def _webp_files() -> Iterable[tuple[str, Make]]:
    animated: dict[str, Any] = {"save_all": True, "append_images": [photo().rotate(180)]}
    yield "webp", partial(saved, "webp")
    yield "webp, lossless", partial(saved, "webp", lossless=True)
    yield "webp with alpha", partial(saved, "webp", "RGBA")
    yield "webp with alpha, lossless", partial(saved, "webp", "RGBA", lossless=True)
    yield "webp, animated", partial(saved, "webp", **animated)
    yield "webp with a profile", partial(saved, "webp", icc_profile=bytes(33))
    yield "webp with XMP", partial(saved, "webp", xmp=XMP)
    yield "webp with bytes behind its end", lambda: saved("webp") + b"and more" * 9
    yield "webp with an unknown part", lambda: _extended(b"ABCD", b"anything")
    yield "webp whose size is too small", lambda: _resized(saved("webp"), -2)
    yield "webp whose size is too large", lambda: _resized(saved("webp"), 2)
    yield "webp with a padding byte missing", lambda: _extended(b"XMP ", XMP[:-1])[:-1]
    for name, exif in ODD_EXIF.items():
        yield f"webp with EXIF of {name}", partial(saved, "webp", exif=exif or b"\0")
        yield f"webp with EXIF of {name}, after a prefix", partial(saved, "webp", exif=b"Exif\0\0" + exif)
        yield f"webp, animated, with EXIF of {name}", partial(saved, "webp", exif=exif or b"\0", **animated)


def _extended(kind: bytes, content: bytes) -> bytes:
    data = saved("webp", exif=b"\0\0")
    place = data.index(b"EXIF")
    data = data[:place] + kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:]


def _resized(data: bytes, by: int) -> bytes:
    return data[:4] + struct.pack("<I", len(data) - 8 + by) + data[8:]


def _gif_files() -> Iterable[tuple[str, Make]]:
    def gif() -> bytes:
        return saved("gif", "P")

    yield "gif", gif
    yield "gif of 1987", lambda: b"GIF87a" + gif()[6:]
    yield "gif, interlaced", partial(saved, "gif", "P", interlace=True)
    yield "gif in grey", partial(saved, "gif", "L")
    yield "gif in black and white", partial(saved, "gif", "1")
    yield "gif with transparency", partial(saved, "gif", "P", transparency=3)
    yield "gif with a comment", partial(saved, "gif", "P", comment=b"made by hand" * 40)
    yield "gif, animated", partial(saved, "gif", "P", save_all=True, append_images=[photo("P").rotate(90)], loop=0)
    yield "gif without its end", lambda: gif().removesuffix(b";")
    yield "gif with bytes behind its end", lambda: gif() + b"and more" * 9
    yield "gif with bytes in front of its frame", lambda: inserted(gif(), b"\x2c", b"\0\0\0")
    yield "gif with text", lambda: inserted(gif(), b"\x2c", b"\x21\x01\x0c" + bytes(12) + b"\x02hi\0")
    yield (
        "gif with XMP",
        lambda: inserted(gif(), b"\x2c", b"\x21\xff\x0bXMP DataXMP" + XMP + bytes(range(255, -1, -1)) + b"\0"),
    )
    yield "gif on a larger screen", lambda: gif()[:6] + struct.pack("<HH", 40, 30) + gif()[10:]
    yield "gif beyond its screen", lambda: gif()[:6] + struct.pack("<HH", 4, 3) + gif()[10:]
    yield "gif of no screen", lambda: gif()[:6] + bytes(4) + gif()[10:]


def bmp(
    bits: int, *, header: int = 40, height: int = HEIGHT, compression: int = 0, gap: int = 0, masks: bytes = b""
) -> bytes:
    noise = Random(bits)
    colours = 1 << bits if bits <= 8 else 0
    row = -(-WIDTH * bits // 32) * 4
    pixels = noise.randbytes(row * abs(height))
    if header == 12:
        head, palette = struct.pack("<IHHHH", 12, WIDTH, height, 1, bits), noise.randbytes(3 * colours)
    else:
        head = struct.pack("<IiiHHIIiiII", header, WIDTH, height, 1, bits, compression, len(pixels), 0, 0, colours, 0)
        head, palette = (head + masks).ljust(header, b"\0"), noise.randbytes(4 * colours)
        head += masks[max(0, header - 40) :] if header == 40 else b""
    start = 14 + len(head) + len(palette) + gap
    return struct.pack("<2sIHHI", b"BM", start + len(pixels), 0, 0, start) + head + palette + bytes(gap) + pixels


def _bmp_files() -> Iterable[tuple[str, Make]]:
    for bits in (1, 4, 8, 16, 24, 32):
        yield f"bmp of {bits} bits", partial(bmp, bits)
        yield f"bmp of {bits} bits, from the top", partial(bmp, bits, height=-HEIGHT)
    for header in (12, 64, 108, 124):
        yield f"bmp with a header of {header} bytes", partial(bmp, 24, header=header)
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    for header in (40, 52, 56, 108, 124):
        yield (
            f"bmp of bit fields with a header of {header} bytes",
            partial(bmp, 32, header=header, compression=3, masks=masks[: 12 if header in (40, 52) else 16]),
        )
    yield (
        "bmp of bit fields of 16 bits",
        partial(bmp, 16, header=108, compression=3, masks=struct.pack("<4I", 0xF800, 0x7E0, 0x1F, 0)),
    )
    yield "bmp with a gap", partial(bmp, 24, gap=7)
    yield "bmp with bytes behind its end", lambda: bmp(24) + b"and more" * 9
    yield "bmp whose size is zero", lambda: bmp(24)[:2] + bytes(4) + bmp(24)[6:]


def files() -> Iterable[tuple[str, Make]]:
    for files_of in (_png_files, _jpeg_files, _webp_files, _gif_files, _bmp_files):
        yield from files_of()
