"""Every accepted kind of image is decoded to the pixels that it stores, compared with conversions written in numpy
alone. Files are written byte by byte where possible: Pillow might read its own files with the mistake it wrote them
with.
"""

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from triptych.domain.media import MediaInfo
from triptych.engine.media.images import decode_image, to_rgb
from triptych.errors import InvalidMedia
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing.hostile import chunk, with_chunks

Array = npt.NDArray[Any]

LIMITS = MediaLimits()
GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6
CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}
HEIGHT, WIDTH = 13, 37
NOISE = np.random.default_rng(0)


def written_png(values: Array, bits: int, kind: int, *chunks: bytes) -> bytes:
    """[height, width, channels] of samples."""
    height, width, channels = values.shape
    assert channels == CHANNELS[kind]
    flat = values.reshape(height, width * channels)
    if bits == 16:
        rows = flat.astype(">u2").view(np.uint8).reshape(height, -1)
    else:
        spread = (flat[..., None] >> np.arange(bits - 1, -1, -1)) & 1
        rows = np.packbits(spread.astype(np.uint8).reshape(height, -1), axis=1)
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    body = chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def noise(bits: int, kind: int) -> Array:
    return NOISE.integers(0, 1 << bits, (HEIGHT, WIDTH, CHANNELS[kind]))


def to_eight_bits(values: Array, bits: int) -> Array:
    return values >> 8 if bits == 16 else values * 255 // ((1 << bits) - 1)


def over_white(colours: Array, alpha: Array) -> Array:
    share = alpha[..., None].astype(float) / 255
    return colours * share + 255 * (1 - share)


def decoded(data: bytes) -> Array:
    info = inspect_media(data, LIMITS)
    pixels = decode_image(data, info)
    assert pixels.shape == (info.height, info.width, 3)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    return pixels.astype(int)


def assert_shows(data: bytes, wanted: Array, tolerance: float = 0.0) -> None:
    found = decoded(data)
    assert found.shape == (*wanted.shape[:2], 3)
    assert np.abs(found - wanted).max() <= tolerance


COMPOSITING = 1.0
"""Pillow composites in whole numbers."""


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("transparent", [False, True])
def test_grey_images_of_any_depth(bits: int, transparent: bool) -> None:
    values = noise(bits, GREY)
    colour = int(values[5, 7, 0])
    chunks = [chunk(b"tRNS", struct.pack(">H", colour))] if transparent else []
    grey = np.repeat(to_eight_bits(values, bits), 3, axis=2)
    wanted = over_white(grey, np.where(values[..., 0] == colour, 0, 255)) if transparent else grey
    assert_shows(written_png(values, bits, GREY, *chunks), wanted)


@pytest.mark.parametrize("bits", [8, 16])
def test_colour_images_of_8_and_16_bits(bits: int) -> None:
    values = noise(bits, RGB)
    assert_shows(written_png(values, bits, RGB), to_eight_bits(values, bits))


@pytest.mark.parametrize("high", [0, 0x100])
def test_a_transparent_colour_becomes_white(high: int) -> None:
    values = noise(8, RGB) // 128  # eight colours
    colour = values[5, 7]
    data = written_png(values, 8, RGB, chunk(b"tRNS", struct.pack(">3H", *(colour + high))))
    assert_shows(data, over_white(values, np.where((values == colour).all(axis=2), 0, 255)))


def test_a_transparent_colour_of_16_bits_is_refused() -> None:
    values = noise(16, RGB)
    data = written_png(values, 16, RGB, chunk(b"tRNS", struct.pack(">3H", *values[5, 7])))
    with pytest.raises(InvalidMedia, match="16 bits per colour and a transparent one, which is not supported"):
        decoded(data)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", [GREY_ALPHA, RGBA])
def test_alpha_is_composited_over_white(bits: int, kind: int) -> None:
    values = noise(bits, kind)
    values[0] = 0  # black and fully transparent
    eight = to_eight_bits(values, bits)
    data = written_png(values, bits, kind)
    assert_shows(data, over_white(eight[..., :-1], eight[..., -1]), COMPOSITING)
    assert (decoded(data)[0] == 255).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("transparent", ["nothing", "one", "several"])
def test_palette_images(bits: int, transparent: str) -> None:
    values = noise(bits, PALETTE)
    palette = NOISE.integers(0, 256, (1 << bits, 3))
    alpha = np.full(1 << bits, 255)
    if transparent == "one":
        alpha[1] = 0
    elif transparent == "several":
        alpha = NOISE.integers(0, 256, 1 << bits)
    chunks = [chunk(b"PLTE", palette.astype(np.uint8).tobytes())]
    chunks += [chunk(b"tRNS", alpha.astype(np.uint8).tobytes())] if transparent != "nothing" else []
    wanted = over_white(palette, alpha)[values[..., 0]]
    assert_shows(written_png(values, bits, PALETTE, *chunks), wanted, COMPOSITING)


def test_a_large_image_composited_in_bands_has_no_seams() -> None:
    values = np.random.default_rng(1).integers(0, 256, (1500, 1501, 2))
    assert_shows(written_png(values, 8, GREY_ALPHA), over_white(values[..., :1].repeat(3, 2), values[..., 1]), 1.0)


def test_gamma_and_colour_profiles_change_nothing() -> None:
    values = noise(8, RGB)
    profile = b"name\0\0" + zlib.compress(bytes(128))
    for extra in (chunk(b"gAMA", struct.pack(">I", 100_000)), chunk(b"iCCP", profile), chunk(b"sRGB", b"\0")):
        assert_shows(with_chunks(written_png(values, 8, RGB), extra), values)


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    out = BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def plain(mode: str, colour: tuple[int, ...]) -> Image.Image:
    return Image.fromarray(np.full((16, 16, len(colour)), colour, dtype=np.uint8).squeeze(), mode=None).convert(mode)


INKS = [(0, 0, 0, 0), (255, 0, 0, 0), (0, 255, 255, 0), (0, 0, 0, 255), (30, 90, 200, 40), (255, 255, 255, 255)]


def printed(inks: tuple[int, ...]) -> Array:
    """CMYK inks on white paper as RGB."""
    cyan_magenta_yellow, black = np.array(inks[:3], dtype=float), float(inks[3])
    return np.broadcast_to((255 - cyan_magenta_yellow) * (255 - black) / 255, (16, 16, 3))


LOSSY = 3.0


@pytest.mark.parametrize("inks", INKS)
@pytest.mark.parametrize("adobe", [True, False])
def test_cmyk_images(inks: tuple[int, ...], adobe: bool) -> None:
    """CMYK stored inverted, as by Adobe; so are files without a writer's marker."""
    data = saved(Image.new("CMYK", (16, 16), inks), "jpeg", quality=100)
    assert b"Adobe" in data
    if not adobe:
        place = data.index(b"\xff\xee")
        data = data[:place] + data[place + 16 :]
    assert_shows(data, printed(inks), LOSSY)


@pytest.mark.parametrize("stored", [(200, 128, 128, 255), (90, 140, 100, 200), (255, 128, 128, 0)])
def test_ycck_images(stored: tuple[int, int, int, int]) -> None:
    data = saved(Image.new("CMYK", (16, 16), tuple(255 - value for value in stored)), "jpeg", quality=100)
    place = data.index(b"Adobe") + 11
    data = data[:place] + b"\2" + data[place + 1 :]  # the stored values are luma, chroma and black from now on
    luma, blue, red, black = map(float, stored)
    colours = (
        luma + 1.402 * (red - 128),
        luma - 0.344136 * (blue - 128) - 0.714136 * (red - 128),
        luma + 1.772 * (blue - 128),
    )
    inks = (*np.clip(colours, 0, 255), 255 - black)
    assert_shows(data, printed(inks), LOSSY)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("progressive", [True, False])
def test_jpeg_in_grey_and_colour(mode: str, progressive: bool) -> None:
    colour = (90, 160, 30) if mode == "RGB" else (77,)
    data = saved(plain(mode, colour), "jpeg", quality=100, progressive=progressive)
    assert_shows(data, np.broadcast_to(np.array(colour), (16, 16, 3)), LOSSY)


def test_webp_with_and_without_alpha() -> None:
    values = NOISE.integers(0, 256, (HEIGHT, WIDTH, 4)).astype(np.uint8)
    data = saved(Image.fromarray(values), "webp", lossless=True, exact=True)
    assert_shows(data, over_white(values[..., :3].astype(int), values[..., 3].astype(int)), COMPOSITING)
    assert_shows(saved(Image.fromarray(values[..., :3]), "webp", lossless=True), values[..., :3].astype(int))


def test_a_gif_shows_its_first_frame_over_white() -> None:
    palette = NOISE.integers(0, 256, (4, 3))
    indices = NOISE.integers(0, 4, (HEIGHT, WIDTH)).astype(np.uint8)
    frames = [Image.fromarray(indices, mode=None).convert("L") for _ in range(2)]
    for frame in frames:
        frame.putpalette(palette.astype(np.uint8).tobytes())
    first, second = frames
    data = saved(first, "gif", save_all=True, append_images=[second.rotate(180)], transparency=2, disposal=2)
    wanted = palette.copy()
    wanted[2] = 255
    assert_shows(data, wanted[indices])


def test_bmp_of_every_depth() -> None:
    colours = NOISE.integers(0, 256, (HEIGHT, WIDTH, 3)).astype(np.uint8)
    assert_shows(saved(Image.fromarray(colours), "bmp"), colours.astype(int))
    assert_shows(saved(Image.fromarray(colours[..., 0]), "bmp"), colours[..., :1].repeat(3, 2).astype(int))
    alpha = NOISE.integers(0, 256, (HEIGHT, WIDTH, 4)).astype(np.uint8)
    stored = alpha[::-1, :, [2, 1, 0, 3]].tobytes()
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII", 108, WIDTH, HEIGHT, 1, 32, 3, len(stored), 0, 0, 0, 0) + masks + bytes(52)
    data = struct.pack("<2sIHHI", b"BM", 122 + len(stored), 0, 0, 122) + header + stored
    assert_shows(data, over_white(alpha[..., :3].astype(int), alpha[..., 3].astype(int)), COMPOSITING)


def test_run_length_encoded_bmp() -> None:
    row, pixels = b"\x05\x01\x02\x02\0\0", [[1] * 5 + [2] * 2] * 2
    palette = NOISE.integers(0, 256, (256, 4)).astype(np.uint8)
    stored = row * 2 + b"\0\1"
    header = struct.pack("<IiiHHIIiiII", 40, 7, 2, 1, 8, 1, len(stored), 0, 0, 256, 0)
    data = struct.pack("<2sIHHI", b"BM", 54 + 1024 + len(stored), 0, 0, 54 + 1024) + header + palette.tobytes() + stored
    assert_shows(data, palette[np.array(pixels)][..., 2::-1].astype(int))


@pytest.mark.parametrize("orientation", range(10))
def test_exif_orientations(orientation: int) -> None:
    """EXIF's meaning of the stored first row and column, written as a mapping of positions."""
    values = noise(8, RGB)
    exif = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0" + struct.pack("<HH", orientation, 0) + bytes(4)
    wanted = np.empty((WIDTH, HEIGHT, 3) if 5 <= orientation <= 8 else (HEIGHT, WIDTH, 3), dtype=int)
    height, width = wanted.shape[:2]
    for y in range(HEIGHT):
        for x in range(WIDTH):
            place = {
                2: (y, width - 1 - x),
                3: (height - 1 - y, width - 1 - x),
                4: (height - 1 - y, x),
                5: (x, y),
                6: (x, width - 1 - y),
                7: (height - 1 - x, width - 1 - y),
                8: (height - 1 - x, y),
            }.get(orientation, (y, x))
            wanted[place] = values[y, x]
    assert_shows(written_png(values, 8, RGB, chunk(b"eXIf", exif)), wanted)


@pytest.mark.parametrize("mode", ["F", "LAB", "HSV", "YCbCr", "RGBX", "La", "RGBa"])
def test_modes_of_no_accepted_format_are_refused(mode: str) -> None:
    with pytest.raises(InvalidMedia, match=f"mode {mode}, which is not supported"):
        to_rgb(Image.new(mode, (4, 3)), "png")


def test_integers_beyond_16_bits_are_refused() -> None:
    assert (to_rgb(Image.new("I", (4, 3), 0x1234), "png") == 0x12).all()
    for value in (-1, 0x10000):
        with pytest.raises(InvalidMedia, match="more than 16 bits"):
            to_rgb(Image.new("I", (4, 3), value), "png")


def test_a_palette_with_an_alpha_channel_is_composited() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 0])
    image.putpixel((1, 0), 1)
    image = image.convert("PA")
    image.putpixel((1, 0), (1, 0))
    assert to_rgb(image, "png").tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_an_image_of_another_size_than_announced_is_refused() -> None:
    data = written_png(noise(8, RGB), 8, RGB)
    info: MediaInfo = inspect_media(data, LIMITS)
    with pytest.raises(InvalidMedia, match=f"the image is {WIDTH}x{HEIGHT}, its header says 5x5"):
        decode_image(data, MediaInfo(info.modality, info.format, 5, 5, info.nbytes, info.digest))
