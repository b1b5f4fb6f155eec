"""The cost of decoding an item, and of computing that cost, is bounded by its bytes before a decoder reads them.

Each file here is small, but would keep a decoder or header parser busy for seconds or hours.
"""

import struct
import zlib
from io import BytesIO
from random import Random
from time import process_time

import numpy as np
import pytest
from PIL import Image

from triptych.engine.media.images import decode_image
from triptych.errors import InvalidMedia
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing.hostile import chunk, jpeg_of_many_scans, with_chunks
from triptych.testing.media import png

LIMITS = MediaLimits()
MAX_INSPECT_S = 2.0
"""Of CPU time; each of these took much longer, or would have, before there was a bound."""


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    out = BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def photo(width: int, height: int, mode: str = "RGB") -> Image.Image:
    small = Image.frombytes("RGB", (16, 16), Random(0).randbytes(768))
    return small.resize((width, height)).convert(mode)


def refused(data: bytes, message: str, limits: MediaLimits = LIMITS) -> None:
    started_s = process_time()
    with pytest.raises(InvalidMedia, match=message):
        inspect_media(data, limits)
    assert process_time() - started_s < MAX_INSPECT_S


@pytest.mark.parametrize("progressive", [True, False])
def test_a_jpeg_of_many_scans_is_refused_by_scans_times_pixels(progressive: bool) -> None:
    data = jpeg_of_many_scans(8000, 8000, scans=300, progressive=progressive)
    assert len(data) < 1 << 20
    refused(data, r"goes 30\d times over its 64000000 pixels, .*; the limit is 1500000000")


def test_very_many_scans_of_a_pixel_are_refused() -> None:
    refused(jpeg_of_many_scans(8, 8, scans=30_000), r"goes 300\d\d times over its 64 pixels")


def test_fill_bytes_in_front_of_a_scan_hide_nothing() -> None:
    data = jpeg_of_many_scans(8000, 8000, scans=300).replace(b"\xff\xda", b"\xff\xff\xff\xda")
    refused(data, r"goes 30\d times")


@pytest.mark.parametrize("size", [(8000, 8000), (640, 480)])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.slow
def test_an_ordinary_progressive_jpeg_is_accepted(size: tuple[int, int], mode: str) -> None:
    data = saved(Image.new(mode, size), "jpeg", progressive=True)
    assert inspect_media(data, LIMITS).width == size[0]


def test_marker_bytes_in_a_thumbnail_are_not_counted_as_scans() -> None:
    comment = b"\xff\xda" * 30_000
    data = saved(photo(64, 64), "jpeg", progressive=True, comment=comment)
    assert inspect_media(data, LIMITS).width == 64


@pytest.mark.parametrize("frame", [0xC3, 0xC5, 0xC9, 0xCA])
def test_jpeg_processes_without_a_cost_bound_are_refused(frame: int) -> None:
    data = saved(photo(64, 64), "jpeg").replace(b"\xff\xc0", bytes((0xFF, frame)))
    refused(data, "lossless, hierarchical or arithmetic-coded, which is not supported")


def test_a_jpeg_with_two_frame_headers_is_refused() -> None:
    data = saved(photo(64, 64), "jpeg")
    place = data.index(b"\xff\xc0")
    refused(data[:place] + data[place : place + 19] + data[place:], "more than one frame header")


def test_exif_in_very_many_segments_costs_nothing() -> None:
    data = saved(photo(64, 64), "jpeg")
    segment = b"\xff\xe1" + struct.pack(">H", 308) + b"Exif\0\0" + bytes(300)
    started_s = process_time()
    many = data[:2] + segment * 60_000 + data[2:]
    assert inspect_media(many, LIMITS).width == 64
    assert decode_image(many, inspect_media(many, LIMITS)).shape == (64, 64, 3)
    assert process_time() - started_s < MAX_INSPECT_S


def test_very_many_fill_bytes_are_refused() -> None:
    data = saved(photo(64, 64), "jpeg")
    refused(data[:2] + b"\xff" * (16 << 20) + data[2:], "more than 131072 bytes between its segments")


@pytest.mark.parametrize(
    "content",
    [
        (b"iCCP", b"name\0\0"),
        (b"zTXt", b"name\0\0"),
        (b"iTXt", b"name\0\1\0\0\0"),
    ],
)
def test_png_metadata_is_not_inflated(content: tuple[bytes, bytes]) -> None:
    kind, prefix = content
    bomb = chunk(kind, prefix + zlib.compress(bytes((1 << 20) - 1), 9)[:-4])
    data = with_chunks(png(8, 8), bomb * 2000)
    started_s = process_time()
    assert np.array_equal(
        decode_image(data, inspect_media(data, LIMITS)), decode_image(png(8, 8), inspect_media(png(8, 8), LIMITS))
    )
    assert process_time() - started_s < MAX_INSPECT_S


@pytest.mark.parametrize("mode", ["P", "L"])
def test_bmp_run_lengths_are_bounded_by_pixels_and_by_bytes(mode: str) -> None:
    data = bytearray(saved(Image.new(mode, (100, 100)), "bmp"))
    data[30:34] = struct.pack("<I", 1)
    assert inspect_media(bytes(data), LIMITS).width == 100
    refused(bytes(data) + b"\1\0" * (4 << 20), "goes .* times over its 10000 pixels")
    data[18:26] = struct.pack("<ii", 3000, 3000)
    refused(bytes(data), "goes 256 times over its 9000000 pixels")


def test_blocks_of_all_gif_extensions_are_counted_together() -> None:
    gif = saved(Image.new("L", (8, 8)), "gif")
    extension = b"\x21\xfe" + b"\1\0" * 60_000 + b"\0"
    refused(gif[:13] + gif[13 : gif.index(b"\x2c")] + extension * 100, "more than 65536 parts")


def test_a_webm_of_very_many_tracks_is_refused() -> None:
    tracks, blocks = b"\xae\x80" * 20_000, b"\xa3\x84\x81\0\0\0" * 4000
    refused(b"\x1a\x45\xdf\xa3\x80" + tracks + blocks, "more than 64 tracks")


def test_an_mp4_of_very_many_tracks_is_refused() -> None:
    track = struct.pack(">I4s", 8, b"trak")
    refused(struct.pack(">I4s4sII", 20, b"ftyp", b"isom", 0, 0) + track * 10_000, "more than 64 tracks")


def test_an_mp4_with_a_very_large_table_is_refused() -> None:
    table = struct.pack(">I4sII", 16 + (16 << 20), b"stts", 0, 2 << 20) + bytes(16 << 20)
    boxes = table
    for kind in (b"stbl", b"minf", b"mdia", b"trak", b"moov"):
        boxes = struct.pack(">I4s", 8 + len(boxes), kind) + boxes
    refused(struct.pack(">I4s4sII", 20, b"ftyp", b"isom", 0, 0) + boxes, "a table of more than")


def test_very_many_tags_of_an_mp3_are_refused() -> None:
    refused(b"ID3\4\0\0\0\0\0\0" * 1_000_000, "more than 262144 parts")


def test_samples_of_audio_are_bounded() -> None:
    header = struct.pack(">I", 34)[1:] + bytes(10) + struct.pack(">Q", 768_000 << 44 | 7 << 41 | 15 << 36 | 1 << 30)
    refused(b"fLaC\x80" + header + bytes(16), "has 1073741824 samples, the limit is 200000000")


def test_every_limit_is_a_setting() -> None:
    data = jpeg_of_many_scans(8000, 8000, scans=30)
    refused(data, "counts as 1984000000 scanned pixels")
    assert inspect_media(data, MediaLimits(max_scanned_pixels=10**12)).width == 8000
