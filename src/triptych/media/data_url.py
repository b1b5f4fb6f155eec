"""Base64 and ``data:`` URLs (RFC 2397), the ways in which the OpenAI API carries an item inside a request."""

import binascii
import re

from triptych.errors import InvalidMedia

# type/subtype, then parameters; the charset of a parameter does not matter to media.
_NAME = r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}"
_HEADER = re.compile(rf"data:({_NAME}/{_NAME})(?:;[^;,]{{1,64}}){{0,8}};base64", re.IGNORECASE)
_MAX_HEADER_CHARS = 512


def decode_data_url(url: str, max_bytes: int) -> tuple[str, bytes]:
    """The media type, in lower case, and the bytes of a base64 ``data:`` URL, as ``decode_base64`` takes them.

    Raises InvalidMedia.
    """
    comma = url.find(",", 0, _MAX_HEADER_CHARS)
    header = _HEADER.fullmatch(url[:comma]) if comma >= 0 else None
    if header is None:
        raise InvalidMedia("the data URL does not have the form data:<type>/<subtype>;base64,<data>")
    return header[1].lower(), decode_base64(url[comma + 1 :], max_bytes, "the data URL")


def decode_base64(text: str, max_bytes: int, what: str = "the data") -> bytes:
    """The bytes that a text spells. ``what`` names it in errors.

    The size is computed from the length before anything is decoded. Only the standard alphabet with its padding is
    taken: no white space, no URL-safe letters, no percent-escapes. Raises InvalidMedia.
    """
    if not text:
        raise InvalidMedia(f"{what} has no data")
    nbytes = len(text) // 4 * 3 - (text.endswith("==") + text.endswith("="))
    if nbytes > max_bytes:
        raise InvalidMedia(f"{what} holds {nbytes} bytes, the limit is {max_bytes}")
    if len(text) % 4:
        raise InvalidMedia(f"{what}'s base64 is broken")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:  # binascii.Error is one, and so is what non-ASCII text raises
        raise InvalidMedia(f"{what}'s base64 is broken") from error
