"""Image headers parsed without Pillow, with the same results; InvalidMedia for everything else."""

import struct
import zlib
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from triptych.domain.media import Modality
from triptych.errors import InvalidMedia
from triptych.media.sniff import MediaLimits, inspect_media

LIMITS = MediaLimits()
FORMATS = ("png", "jpeg", "webp", "gif", "bmp")


@cache
def image(form: str, width: int = 7, height: int = 3, orientation: int = 1, *, mode: str = "RGB") -> bytes:
    picture = Image.new(mode, (width, height), 128 if mode in "LP1" else None)
    options: dict[str, object] = {}
    if orientation != 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    out = BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


def described_by_pillow(data: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(data)) as picture:
        return ImageOps.exif_transpose(picture).size


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunk(png: bytes, chunk: bytes, before: bytes) -> bytes:
    place = png.index(before) - 4
    return png[:place] + chunk + png[place:]


@pytest.mark.parametrize("form", FORMATS)
def test_an_image_is_described(form: str) -> None:
    data = image(form)
    info = inspect_media(data, LIMITS)
    assert (info.modality, info.format, info.width, info.height) == (Modality.IMAGE, form, 7, 3)
    assert info.nbytes == len(data)
    assert info.digest == blake2b(data, digest_size=32).digest()


@pytest.mark.parametrize("form", FORMATS)
@given(width=st.integers(1, 600), height=st.integers(3, 40))
def test_sizes_equal_those_of_pillow(form: str, width: int, height: int) -> None:
    data = image(form, width, height)
    info = inspect_media(data, LIMITS)
    assert (info.width, info.height) == described_by_pillow(data) == (width, height)


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("orientation", range(10))
def test_the_orientation_is_applied(form: str, orientation: int) -> None:
    data = image(form, 7, 3, orientation)
    info = inspect_media(data, LIMITS)
    assert (info.width, info.height) == described_by_pillow(data)
    assert (info.width < info.height) == (5 <= orientation <= 8)


def test_an_orientation_after_the_pixels_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    chunk = png_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\x00\x00"))
    data = with_chunk(image("png"), chunk, before=b"IEND")
    info = inspect_media(data, LIMITS)
    assert (info.width, info.height) == described_by_pillow(data) == (3, 7)


@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("kind", ["H", "I"])
def test_both_byte_orders_and_integer_types_of_exif_are_read(byte_order: str, kind: str) -> None:
    magic = b"II*\x00" if byte_order == "<" else b"MM\x00*"
    value = struct.pack(byte_order + kind, 8).ljust(4, b"\0")
    field = struct.pack(byte_order + "HHI", 0x0112, 3 if kind == "H" else 4, 1) + value
    exif = magic + struct.pack(byte_order + "IH", 8, 1) + field
    data = with_chunk(image("png"), png_chunk(b"eXIf", exif + bytes(4)), before=b"IDAT")
    info = inspect_media(data, LIMITS)
    assert (info.width, info.height) == described_by_pillow(data) == (3, 7)


@pytest.mark.parametrize("text", [b'tiff:Orientation="6"', b"<tiff:Orientation>6</tiff:Orientation>"])
@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_the_orientation_in_xmp_is_applied(form: str, text: bytes) -> None:
    if form == "png":
        chunk = png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + text)
        data = with_chunk(image("png"), chunk, before=b"IDAT")
    else:
        out = BytesIO()
        Image.new("RGB", (7, 3)).save(out, form, xmp=text)
        data = out.getvalue()
    info = inspect_media(data, LIMITS)
    assert (info.width, info.height) == described_by_pillow(data) == (3, 7)


def test_broken_exif_is_ignored() -> None:
    for exif in (b"", b"II*\0", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff", b"nonsense"):
        data = with_chunk(image("png"), png_chunk(b"eXIf", exif), before=b"IDAT")
        assert inspect_media(data, LIMITS).width == 7


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("options", [{"lossless": True}, {"lossless": False}, {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}])
def test_all_kinds_of_webp_are_read(mode: str, options: dict[str, object]) -> None:
    out = BytesIO()
    Image.new(mode, (300, 77)).save(out, "webp", **options)
    info = inspect_media(out.getvalue(), LIMITS)
    assert (info.width, info.height) == (300, 77)


def test_a_progressive_jpeg_is_read() -> None:
    out = BytesIO()
    Image.new("L", (300, 77)).save(out, "jpeg", progressive=True, comment=b"hello", icc_profile=bytes(70_000))
    assert inspect_media(out.getvalue(), LIMITS).width == 300


@pytest.mark.parametrize("form", ["gif", "webp"])
def test_the_first_frame_of_an_animation_counts(form: str) -> None:
    out = BytesIO()
    frames = [Image.new("RGB", (9, 5), (shade, 0, 0)) for shade in (0, 100, 200)]
    frames[0].save(out, form, save_all=True, append_images=frames[1:])
    info = inspect_media(out.getvalue(), LIMITS)
    assert (info.width, info.height) == (9, 5)


def test_a_gif_frame_beyond_its_screen_has_pillows_size() -> None:
    data = bytearray(image("gif"))
    data[6:10] = struct.pack("<HH", 2, 2)
    info = inspect_media(bytes(data), LIMITS)
    assert (info.width, info.height) == described_by_pillow(bytes(data)) == (7, 3)


def test_a_top_down_bmp_is_read() -> None:
    data = bytearray(image("bmp"))
    data[22:26] = struct.pack("<i", -3)
    assert inspect_media(bytes(data), LIMITS).height == described_by_pillow(bytes(data))[1] == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"not an image at all", r"format is not known; accepted are images \(png, jpeg, webp, gif, bmp\)"),
        (b"%PDF-1.7\n" + image("jpeg"), "is a PDF document"),
        (b"PK\x03\x04" + image("png"), "is a ZIP archive"),
        (b"GIF89a/*" + b"alert(1);" * 9, "gif image has no frame"),
        (image("png")[:-12], "png image is cut off"),
        (image("png")[:20], "png image is cut off"),
        (image("jpeg")[:100], "jpeg image is cut off"),
        (image("webp")[:-4], "webp image is cut off"),
        (image("gif")[:8], "gif image is cut off"),
        (image("bmp")[:20], "bmp image is cut off"),
        (b"\xff\xd8\xff\xd9", "jpeg image has no frame header"),
    ],
)
def test_incomplete_and_foreign_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidMedia, match=message):
        inspect_media(data, LIMITS)


def _box(brand: bytes, *compatible: bytes) -> bytes:
    content = brand + bytes(4) + b"".join(compatible)
    return struct.pack(">I4s", 8 + len(content), b"ftyp") + content + b"\0\0\0\x08meta" + bytes(64)


def _avif() -> bytes:
    out = BytesIO()
    Image.new("RGB", (7, 3)).save(out, "avif")
    return out.getvalue()


FOREIGN = {
    "an AVIF image": [_avif(), _box(b"avis"), _box(b"mif1", b"miaf", b"avif")],
    "a HEIC image": [_box(b"heic"), _box(b"hevc"), _box(b"msf1", b"hevc")],
    "a HEIF image": [_box(b"mif1"), _box(b"mif1", b"mif1")],
    "a raw photo (CR3)": [_box(b"crx ")],
    "a TIFF image or raw photo": [b"II*\x00" + bytes(64), b"MM\x00*" + bytes(64)],
    "a JPEG XL image": [b"\xff\x0a" + bytes(64), b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(64)],
    "a JPEG 2000 image": [b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64)],
    "an ICO image": [b"\0\0\1\0\1\0" + bytes(64)],
    "a Photoshop file": [b"8BPS\0\1" + bytes(64)],
    "an SVG image": [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\xef\xbb\xbf <?xml version='1.0'?>\n<!-- drawn by hand --><svg/>",
    ],
    "an HTML page": [b"\n<!DOCTYPE html><html>502 Bad Gateway</html>", b"<html><body>404</body></html>"],
    "a JSON text": [b'{"error": {"message": "not found"}}'],
    "a gzip file": [b"\x1f\x8b\x08" + bytes(64)],
    "an AVI video": [b"RIFF\x20\0\0\0AVI LIST" + bytes(64)],
    "raw AAC audio (ADTS)": [b"\xff\xf1\x50\x80" + bytes(64)],
    "base64 text (of a JPEG image): it was encoded twice": [b"/9j/4AAQSkZJRg"],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_known_but_unsupported_format_is_refused_by_name(name: str) -> None:
    for data in FOREIGN[name]:
        with pytest.raises(InvalidMedia) as caught:
            inspect_media(data, LIMITS)
        assert f"the item is {name}, which is not supported; accepted are images (png, " in str(caught.value)


def _with_size(form: str, width: int, height: int) -> bytes:
    """A header that claims another size than that of its pixels."""
    data = bytearray(image(form))
    if form == "png":
        data[16:24] = struct.pack(">II", width, height)
    elif form == "jpeg":
        place = data.index(b"\xff\xc0") + 5
        data[place : place + 4] = struct.pack(">HH", height, width)
    elif form == "gif":
        data[6:10] = struct.pack("<HH", width, height)
    else:
        data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


@pytest.mark.parametrize("form", ["png", "jpeg", "gif", "bmp"])
def test_a_decompression_bomb_is_refused_by_its_header(form: str) -> None:
    with pytest.raises(InvalidMedia, match=rf"the {form} image is 50000 x 50000 pixels; the longest side allowed is"):
        inspect_media(_with_size(form, 50_000, 50_000), LIMITS)
    with pytest.raises(InvalidMedia, match=r"100000000 in all; the limit is 64000000"):
        inspect_media(_with_size(form, 10_000, 10_000), LIMITS)


@pytest.mark.parametrize("form", ["png", "jpeg", "bmp"])
@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_an_image_without_pixels_is_refused(form: str, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidMedia, match="it needs at least 1 x 1"):
        inspect_media(_with_size(form, *size), LIMITS)


def test_an_extreme_aspect_ratio_is_refused() -> None:
    assert inspect_media(image("png", 200, 1), LIMITS).width == 200
    for size in ((201, 1), (1, 201)):
        with pytest.raises(InvalidMedia, match="the longer side may be at most 200 times the shorter one"):
            inspect_media(image("png", *size), LIMITS)


def test_an_image_of_one_pixel_is_accepted() -> None:
    assert inspect_media(image("png", 1, 1), LIMITS).pixels == 1


def test_too_many_bytes_are_refused() -> None:
    data = image("png")
    with pytest.raises(InvalidMedia, match=f"the png image has {len(data)} bytes, the limit is 10"):
        inspect_media(data, MediaLimits(max_image_bytes=10))


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_image_pixels is 0"):
        MediaLimits(max_image_pixels=0)


def test_a_file_of_very_many_parts_is_refused() -> None:
    data = with_chunk(image("png"), png_chunk(b"tEXt", b"") * 70_000, before=b"IDAT")
    with pytest.raises(InvalidMedia, match="more than 65536 parts"):
        inspect_media(data, LIMITS)
    gif = image("gif")
    with pytest.raises(InvalidMedia, match="more than 65536 parts"):
        inspect_media(gif[:13] + gif[13 : gif.index(b"\x2c")] + b"\x21\xfe\x00" * 70_000, LIMITS)


def _inspect(data: bytes) -> None:
    try:
        info = inspect_media(data, LIMITS)
    except InvalidMedia:
        return
    if info.modality is not Modality.IMAGE:  # prefixes of clips are tested in test_clips
        return
    assert 1 <= info.width <= LIMITS.max_image_side_px
    assert 1 <= info.height <= LIMITS.max_image_side_px


@given(data=st.binary(max_size=300))
def test_random_bytes_raise_only_invalid_media(data: bytes) -> None:
    _inspect(data)
    for magic in (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff", b"RIFF\x20\0\0\0WEBPVP8X", b"GIF89a", b"BM"):
        _inspect(magic + data)


def _mutate(data: bytes, draw: Callable[..., int]) -> bytes:
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(out) - 1))
        action = draw(st.integers(0, 2))
        if action == 0:
            out[place] = draw(st.integers(0, 255))
        elif action == 1:
            del out[place : place + draw(st.integers(1, 9))]
        else:
            out[place:place] = bytes(draw(st.integers(1, 9)))
        if not out:
            break
    return bytes(out)


@given(draw=st.data(), form=st.sampled_from(FORMATS), orientation=st.sampled_from([1, 6]))
def test_mutations_of_real_images_raise_only_invalid_media(draw: st.DataObject, form: str, orientation: int) -> None:
    _inspect(_mutate(image(form, 20, 10, orientation), draw.draw))
