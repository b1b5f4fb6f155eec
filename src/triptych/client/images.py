"""An image, a video or audio in any accepted form, as the undecoded bytes that the router takes."""

import os
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from triptych.domain.limits import MAX_MESSAGE_NBYTES
from triptych.errors import InvalidMedia
from triptych.files import BadFile, read_bytes
from triptych.media.data_url import decode_data_url


class Savable(Protocol):
    """Satisfied by ``PIL.Image.Image``, without importing Pillow."""

    def save(self, fp: Any, format: str | None = None) -> None: ...  # noqa: A002 - Pillow's name for it


Media = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A path, the bytes of a file, or a ``data:`` URL."""
Image = Media | Savable
"""The same, or a PIL image (which is sent as PNG, losslessly)."""


def image_bytes(image: Image) -> bytes:
    """The bytes to send. Raises InvalidMedia for anything else, and for URLs that would have to be fetched."""
    if isinstance(image, str | os.PathLike | bytes | bytearray | memoryview):
        return media_bytes(image, "image")
    if callable(getattr(image, "save", None)):
        return _saved(image)
    raise InvalidMedia(f"an image is a path, bytes, a data URL or a PIL image, not {type(image).__name__}")


def media_bytes(media: Media, what: str) -> bytes:
    """The bytes to send. ``what`` names the kind of media in errors. Raises InvalidMedia."""
    match media:
        case bytes():
            return media
        case bytearray() | memoryview():
            return bytes(media)
        case str() if media[:5].lower() == "data:":
            return decode_data_url(media, MAX_MESSAGE_NBYTES)
        case str() if media[:8].lower().startswith(("http://", "https://")):
            raise InvalidMedia(
                f"the router takes the {what}'s bytes and fetches nothing: "
                "download it first, or send its URL to the gateway's REST API"
            )
        case str() | os.PathLike():
            return _read(Path(media), what)
    raise InvalidMedia(f"{what} is a path, bytes or a data URL, not {type(media).__name__}")


def _read(path: Path, what: str) -> bytes:
    try:
        return read_bytes(path, MAX_MESSAGE_NBYTES)
    except BadFile as error:
        raise InvalidMedia(f"the {what} {path} {error}") from None


def _saved(image: Savable) -> bytes:
    out = BytesIO()
    try:
        image.save(out, format="PNG")
    except (OSError, ValueError, TypeError) as error:
        raise InvalidMedia(f"the image cannot be written as PNG: {error}; convert it to RGB first") from None
    return out.getvalue()
