"""Recognizes formats that are not accepted, so that errors can name them."""

_IMAGE_BRANDS = {
    b"avif": "an AVIF image",
    b"avis": "an AVIF image",
    b"crx ": "a raw photo (CR3)",
} | dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), "a HEIC image")
_IMAGE_CONTAINERS = frozenset({b"mif1", b"mif2", b"msf1", b"miaf"})
_MAX_BRANDS = 32

_BEGINNINGS = (
    (b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL image"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 image"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 image"),
    (b"II*\0", "a TIFF image or raw photo"),
    (b"MM\0*", "a TIFF image or raw photo"),
    (b"II+\0", "a TIFF image or raw photo"),
    (b"MM\0+", "a TIFF image or raw photo"),
    (b"\0\0\1\0", "an ICO image"),
    (b"\0\0\2\0", "a CUR image"),
    (b"8BPS", "a Photoshop file"),
    (b"qoif", "a QOI image"),
    (b"v/1\x01", "an OpenEXR image"),
    (b"DDS ", "a DDS image"),
    (b"%PDF-", "a PDF document"),
    (b"%!PS", "a PostScript document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"FLV\x01", "an FLV video"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "an ASF file (WMV, WMA)"),
    (b"\0\0\1\xba", "an MPEG program stream"),
    (b"\0\0\1\xb3", "an MPEG video stream"),
    (b"\xff\xf1", "raw AAC audio (ADTS)"),
    (b"\xff\xf9", "raw AAC audio (ADTS)"),
    (b"#!AMR", "AMR audio"),
    (b"MThd", "a MIDI file"),
    (b"version https://git-lfs", "a Git LFS pointer instead of the file"),
    # Base64 that was encoded twice.
    (b"iVBORw0KGgo", "base64 text (of a PNG image): it was encoded twice"),
    (b"/9j/", "base64 text (of a JPEG image): it was encoded twice"),
    (b"UklGR", "base64 text (of a WebP, WAV or AVI file): it was encoded twice"),
    (b"R0lGOD", "base64 text (of a GIF image): it was encoded twice"),
    (b"data:", "a data: URL instead of its content"),
)
_TEXT_LOOKED_AT = 512
_MARKUP = (
    (b"<svg", "an SVG image"),
    (b"<!doctype svg", "an SVG image"),
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<head", "an HTML page"),
    (b"<?xml", "an XML document"),
    (b"{", "a JSON text"),
)


def unsupported_format(data: bytes) -> str:
    """The name, with article, of a known format that is not accepted; "" for an unknown one."""
    if data[4:8] == b"ftyp":
        return _image_in_boxes(data)
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "an AVI video"
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        return "AIFF audio"
    for beginning, name in _BEGINNINGS:
        if data.startswith(beginning):
            return name
    return _markup(data)


def _image_in_boxes(data: bytes) -> str:
    """Tell HEIF from MP4, which shares its container, by the brands in the first box."""
    major = data[8:12]
    if major in _IMAGE_BRANDS or major not in _IMAGE_CONTAINERS:
        return _IMAGE_BRANDS.get(major, "")
    end = min(int.from_bytes(data[:4], "big"), 16 + 4 * _MAX_BRANDS, len(data))
    for place in range(16, end - 3, 4):
        if name := _IMAGE_BRANDS.get(data[place : place + 4]):
            return name
    return "a HEIF image"


def _markup(data: bytes) -> str:
    text = data[:_TEXT_LOOKED_AT].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(b"<?xml") and b"<svg" in text:
        return "an SVG image"
    return next((name for beginning, name in _MARKUP if text.startswith(beginning)), "")
