"""``data:`` URLs (RFC 2397), the way in which the OpenAI API carries an image inside a request."""

import binascii
import re

from triptych.errors import InvalidMedia

# type/subtype, then parameters; the charset of a parameter does not matter to an image.
_NAME = r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}"
_HEADER = re.compile(rf"data:({_NAME}/{_NAME})(?:;[^;,]{{1,64}}){{0,8}};base64", re.IGNORECASE)
_MAX_HEADER_CHARS = 512


def decode_data_url(url: str, max_bytes: int) -> tuple[str, bytes]:
    """The media type, in lower case, and the bytes of a base64 ``data:`` URL.

    The size is computed from the length before anything is decoded. Only the standard alphabet with its padding is
    taken: no white space, no URL-safe letters, no percent-escapes. Raises InvalidMedia.
    """
    comma = url.find(",", 0, _MAX_HEADER_CHARS)
    header = _HEADER.fullmatch(url[:comma]) if comma >= 0 else None
    if header is None:
        raise InvalidMedia("the data URL does not have the form data:<type>/<subtype>;base64,<data>")
    characters = len(url) - comma - 1
    if characters == 0:
        raise InvalidMedia("the data URL has no data")
    nbytes = characters // 4 * 3 - (url.endswith("==") + url.endswith("="))
    if nbytes > max_bytes:
        raise InvalidMedia(f"the data URL holds {nbytes} bytes, the limit is {max_bytes}")
    if characters % 4:
        raise InvalidMedia("the data URL's base64 is broken")
    try:
        data = binascii.a2b_base64(url[comma + 1 :], strict_mode=True)
    except ValueError as error:  # binascii.Error is one, and so is what non-ASCII text raises
        raise InvalidMedia("the data URL's base64 is broken") from error
    return header[1].lower(), data
