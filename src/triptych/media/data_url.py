"""Base64 and ``data:`` URLs (RFC 2397), which carry items inside requests of the OpenAI API."""

import binascii
import re
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from triptych.errors import InvalidMedia

_SCHEME = "data:"
_NAME = r"[a-z0-9][a-z0-9!#$&^_.+-]{0,126}"
_MEDIA_TYPE = re.compile(rf"{_NAME}/{_NAME}", re.IGNORECASE)
_MAX_HEADER_CHARS = 1024
_MAX_ESCAPED_CHARS = 4 << 20
"""Limit for data without base64: its percent-escapes are decoded in Python."""
_PIECE_CHARS = 256 << 10
"""Characters decoded at a time: the GIL is held meanwhile, for less than a few milliseconds."""
_WHITE_SPACE = b" \t\r\n\f\v"
_ESCAPED = tuple(
    (escape, bytes((byte,))) for byte in b"+/=-_\r\n\t " for escape in {b"%%%02X" % byte, b"%%%02x" % byte}
)
"""Percent-escapes of what base64 has beside letters and digits."""
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/=_\s-]")
_NOT_BASE64_ESCAPED = re.compile(
    rb"[^A-Za-z0-9+/=_\s%-]|%(?!" + b"|".join(escape[1:] for escape, _ in _ESCAPED) + rb")"
)


def decode_data_url(url: str | memoryview, max_bytes: int) -> bytes:
    """Decode a ``data:`` URL, base64 (see ``decode_base64``) or percent-encoded, to its bytes. Its media type is not used.

    Raises InvalidMedia.
    """
    begin = url[:_MAX_HEADER_CHARS] if isinstance(url, str) else bytes(url[:_MAX_HEADER_CHARS]).decode("latin-1")
    if begin[: len(_SCHEME)].lower() != _SCHEME:
        raise InvalidMedia("this is not a data: URL")
    header, comma, _ = begin[len(_SCHEME) :].partition(",")
    if not comma:
        raise InvalidMedia(f"the data URL has no comma before its data, within {_MAX_HEADER_CHARS} characters")
    media_type, *parameters = (part.strip(" ") for part in header.split(";"))
    if media_type and not _MEDIA_TYPE.fullmatch(media_type):
        raise InvalidMedia("the data URL's media type is not of the form <type>/<subtype>, and not left out either")
    data = url[len(_SCHEME) + len(header) + 1 :]
    if any(parameter.lower() == "base64" for parameter in parameters):
        return decode_base64(data, max_bytes, "the data URL", escaped=True)
    return _percent_decoded(data, max_bytes)


def decode_base64(text: str | memoryview, max_bytes: int, what: str = "the data", *, escaped: bool = False) -> bytes:
    """Decode base64 as encoders write it: with or without padding and white space, in the standard or URL-safe alphabet.

    ``what`` names the text in errors, which tell the place of a fault, but no content. With ``escaped``, characters may be
    percent-encoded. Text in standard form is not copied before it is decoded. Raises InvalidMedia.
    """
    if not text:
        raise InvalidMedia(f"{what} has no data")
    if len(text) % 4 == 0 and _decoded_nbytes(text) <= max_bytes:
        try:
            data = b"".join(
                binascii.a2b_base64(text[at : at + _PIECE_CHARS], strict_mode=True)
                for at in range(0, len(text), _PIECE_CHARS)
            )
        except ValueError:  # binascii.Error, or text that is not ASCII
            data = b""
        if len(data) == _decoded_nbytes(text):  # without padding before the end
            return data
    return _decoded_leniently(text, max_bytes, what, escaped=escaped)


def _decoded_nbytes(text: str | memoryview) -> int:
    """How many bytes text in standard form decodes to."""
    end = text[-2:] if isinstance(text, str) else bytes(text[-2:]).decode("latin-1")
    return len(text) // 4 * 3 - end.count("=")


def _decoded_leniently(text: str | memoryview, max_bytes: int, what: str, *, escaped: bool) -> bytes:
    letters = bytearray()
    at = 0
    for piece in _pieces(text):
        if (wrong := (_NOT_BASE64_ESCAPED if escaped else _NOT_BASE64).search(piece)) is not None:
            place = at + wrong.start() + 1
            raise InvalidMedia(f"{what}'s base64 is broken: character {place} is none of its alphabet")
        at += len(piece)
        if escaped and b"%" in piece:
            for escape, byte in _ESCAPED:
                piece = piece.replace(escape, byte)  # noqa: PLW2901 - the same piece in another form
        letters += piece.translate(_TO_STANDARD, _WHITE_SPACE)
    padding = len(letters) - len(letters.rstrip(b"="))
    del letters[len(letters) - padding :]
    if b"=" in letters:
        raise InvalidMedia(f"{what}'s base64 is broken: there is padding (=) before its end")
    if padding > 2:
        raise InvalidMedia(f"{what}'s base64 is broken: it ends with {padding} padding characters, 2 is the most")
    if len(letters) % 4 == 1:
        raise InvalidMedia(
            f"{what}'s base64 is broken: {len(letters)} letters are one too many or too few, as if it were cut off"
        )
    if not letters:
        raise InvalidMedia(f"{what} has no data")
    nbytes = len(letters) * 3 // 4
    if nbytes > max_bytes:
        raise InvalidMedia(f"{what} holds {nbytes} bytes, the limit is {max_bytes}")
    letters += b"=" * (-len(letters) % 4)
    return b"".join(binascii.a2b_base64(letters[at : at + _PIECE_CHARS]) for at in range(0, len(letters), _PIECE_CHARS))


def _percent_decoded(data: str | memoryview, max_bytes: int) -> bytes:
    if len(data) > _MAX_ESCAPED_CHARS:
        raise InvalidMedia(
            f"the data URL has {len(data)} characters that are not base64, the limit is {_MAX_ESCAPED_CHARS}"
        )
    decoded = b"".join(unquote_to_bytes(piece) for piece in _pieces(data))
    if not decoded:
        raise InvalidMedia("the data URL has no data")
    if len(decoded) > max_bytes:
        raise InvalidMedia(f"the data URL holds {len(decoded)} bytes, the limit is {max_bytes}")
    return decoded


def _pieces(text: str | memoryview) -> Iterator[bytes]:
    """The text in UTF-8, in pieces of bounded length that do not cut a percent-escape."""
    at = 0
    while at < len(text):
        taken = text[at : at + _PIECE_CHARS]
        piece = taken.encode("utf-8", "surrogatepass") if isinstance(taken, str) else bytes(taken)
        cut = piece.rfind(b"%", len(piece) - 2) if at + len(taken) < len(text) else -1
        kept = len(piece) if cut < 0 else cut
        yield piece[:kept]
        at += len(taken) - (len(piece) - kept)
