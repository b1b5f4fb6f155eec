"""Base64 and ``data:`` URLs (RFC 2397), which carry items inside requests of the OpenAI API."""

import binascii
import re

from triptych.errors import InvalidMedia

# type/subtype, then parameters; the charset of a parameter does not matter to media.
_NAME = r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}"
_HEADER = re.compile(rf"data:({_NAME}/{_NAME})(?:;[^;,]{{1,64}}){{0,8}};base64", re.IGNORECASE)
_MAX_HEADER_CHARS = 512
_PIECE_CHARS = 256 << 10
"""Characters decoded at a time: the GIL is held meanwhile, for less than a few milliseconds."""


def decode_data_url(url: str | memoryview, max_bytes: int) -> tuple[str, bytes]:
    """Decode a base64 ``data:`` URL (see ``decode_base64``) to its media type, in lower case, and bytes.

    Raises InvalidMedia.
    """
    begin = url[:_MAX_HEADER_CHARS] if isinstance(url, str) else bytes(url[:_MAX_HEADER_CHARS]).decode("latin-1")
    comma = begin.find(",")
    header = _HEADER.fullmatch(begin[:comma]) if comma >= 0 else None
    if header is None:
        raise InvalidMedia("the data URL does not have the form data:<type>/<subtype>;base64,<data>")
    return header[1].lower(), decode_base64(url[comma + 1 :], max_bytes, "the data URL")


def decode_base64(text: str | memoryview, max_bytes: int, what: str = "the data") -> bytes:
    """Decode base64; text given as a memoryview is not copied. ``what`` names the text in errors.

    The decoded size is computed and checked first. Only the standard alphabet with padding is accepted: no white space,
    no URL-safe letters, no percent-escapes. Raises InvalidMedia.
    """
    if not text:
        raise InvalidMedia(f"{what} has no data")
    padding = 2 if _ends_with(text, "==") else 1 if _ends_with(text, "=") else 0
    nbytes = len(text) // 4 * 3 - padding
    if nbytes > max_bytes:
        raise InvalidMedia(f"{what} holds {nbytes} bytes, the limit is {max_bytes}")
    if len(text) % 4:
        raise InvalidMedia(f"{what}'s base64 is broken")
    try:
        pieces = [
            binascii.a2b_base64(text[at : at + _PIECE_CHARS], strict_mode=True)
            for at in range(0, len(text), _PIECE_CHARS)
        ]
    except ValueError as error:  # binascii.Error, or non-ASCII text
        raise InvalidMedia(f"{what}'s base64 is broken") from error
    if sum(map(len, pieces)) != nbytes:  # padding before the end
        raise InvalidMedia(f"{what}'s base64 is broken")
    return b"".join(pieces)


def _ends_with(text: str | memoryview, end: str) -> bool:
    last = text[-len(end) :]
    return (last if isinstance(last, str) else bytes(last).decode("latin-1")) == end
