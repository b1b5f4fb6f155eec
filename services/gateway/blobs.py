"""Extracts large base64 blobs (media) from a body before it is parsed as JSON, without copying them.

A JSON parser would build a string of each blob while holding the GIL: tens of milliseconds in which no other request is
served. Finding the blob's two quotes takes about one.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MIN_BLOB_BYTES = 64 << 10
"""Shorter strings are left to the JSON parser."""
_MAX_CANDIDATES = 16384
"""Limit on the occurrences of a field name that are examined, per body and field name."""
MEDIA_FIELDS = (b'"url"', b'"data"')
"""Fields that hold media in most APIs, as JSON libraries write them."""
_ESCAPES = ((b"\\/", b"/"), (b"\\n", b"\n"), (b"\\r", b"\r"))
"""Escapes of characters that base64 may contain. An escaped backslash before one of these letters leaves a backslash
behind.
"""
_RAW_WHITE_SPACE = (b"\n", b"\r", b"\t", b"\f", b"\v")
"""Not valid in a JSON string unless escaped, but skipped in base64."""
_TO_VALUE = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*"')


@dataclass(slots=True)
class ExtractedBody:
    """``rest`` is the body with each blob replaced by a random name that the client cannot guess."""

    rest: bytes | bytearray
    blobs: Mapping[str, memoryview]
    used: set[str] = field(default_factory=set)

    def get(self, text: str) -> str | memoryview:
        """The blob with this name, or ``text`` itself if it is no blob's name."""
        if text not in self.blobs:
            return text
        self.used.add(text)
        return self.blobs[text]

    @property
    def is_used_up(self) -> bool:
        """Whether every blob was looked up. If not, one was in a field that takes no media, which now holds its name."""
        return len(self.used) == len(self.blobs)


def extract_blobs(body: bytes | bytearray, fields: Sequence[bytes] = MEDIA_FIELDS) -> ExtractedBody:
    r"""Replace large strings in media fields by names. The blobs are views of the body, which must not change any more.

    Only whole strings without escapes (but for ``\/``, ``\n`` and ``\r``) are taken, and a name is a string as well, so the
    rest is valid JSON if and only if the body was, apart from the content of the blobs.
    """
    if len(body) < MIN_BLOB_BYTES:
        return ExtractedBody(body, {})
    whole = memoryview(body)
    prefix = f"blob:{secrets.token_hex(16)}:"
    pieces: list[bytes | memoryview] = []
    blobs: dict[str, memoryview] = {}
    at = 0
    for start, end in _spans(body, fields):
        blob = whole[start:end]
        if any(body.find(character, start, end) >= 0 for character in _RAW_WHITE_SPACE):
            continue
        if body.find(b"\\", start, end) >= 0:
            unescaped = bytes(blob)
            for escape, character in _ESCAPES:
                unescaped = unescaped.replace(escape, character)
            if b"\\" in unescaped:
                continue
            blob = memoryview(unescaped)
        name = f"{prefix}{len(blobs)}"
        blobs[name] = blob
        pieces += (whole[at:start], name.encode())
        at = end
    pieces.append(whole[at:])
    return ExtractedBody(b"".join(pieces), blobs)


def _spans(body: bytes | bytearray, fields: Sequence[bytes]) -> list[tuple[int, int]]:
    """The spans of large strings in media fields, in order; each byte is searched at most once per field."""
    spans: list[tuple[int, int]] = []
    for name in fields:
        gaps = zip([0, *(end for _, end in spans)], [*(start for start, _ in spans), len(body)], strict=True)
        spans = sorted(spans + [span for begin, end in gaps for span in _strings(body, name, begin, end)])
    return spans


def _strings(body: bytes | bytearray, name: bytes, begin: int, end: int) -> list[tuple[int, int]]:
    """The spans of a field's large strings between two offsets, without their quotes."""
    spans: list[tuple[int, int]] = []
    at = begin
    for _ in range(_MAX_CANDIDATES):
        at = body.find(name, at, end)
        if at < 0:
            break
        at += len(name)
        opening = _TO_VALUE.match(body, at)
        if opening is None:
            continue
        closing = body.find(b'"', opening.end(), end)
        if closing - opening.end() >= MIN_BLOB_BYTES:
            spans.append((opening.end(), closing))
            at = closing
    return spans
