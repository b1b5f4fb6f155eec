"""Large items are lifted out of a body before it is parsed: they are decoded where they lie, and JSON is read of the rest.

A JSON parser makes a string of an item, and holds the interpreter's lock for all of it: tens of milliseconds in which
nobody else is served. Looking for its two quotes takes one.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_LIFTED_BYTES = 64 << 10
"""Shorter strings are left to the parser."""
_MAX_LOOKED_AT = 16384
"""Places that may be the beginning of an item, per body and name of a field."""
_FIELDS = (b'"url"', b'"data"')
"""What items are in, as it is spelled in every body that a JSON library wrote."""
_TO_VALUE = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*"')


@dataclass(slots=True)
class Lifted:
    """``rest`` is the body with a short name in place of each item. No text of the caller's is such a name."""

    rest: bytes | bytearray
    items: Mapping[str, memoryview]
    used: set[str] = field(default_factory=set)

    def get(self, text: str) -> str | memoryview:
        """The item that a text stands for, as it was spelled; or the text itself."""
        if text not in self.items:
            return text
        self.used.add(text)
        return self.items[text]

    @property
    def is_used_up(self) -> bool:
        """Whether every item was asked for. If not, one lay where none belongs, and its name may be in its place."""
        return len(self.used) == len(self.items)


def lift(body: bytes | bytearray) -> Lifted:
    r"""Take large strings out of the fields that items are in. They stay in the body, which is not to change any more.

    Only what is a whole string without escapes (but for ``\/``) is taken, and a name is again a string, so the rest is
    JSON if and only if the body was, as far as it can be told without the items.
    """
    if len(body) < MIN_LIFTED_BYTES:
        return Lifted(body, {})
    whole = memoryview(body)
    prefix = f"lifted:{secrets.token_hex(16)}:"
    pieces: list[bytes | memoryview] = []
    items: dict[str, memoryview] = {}
    at = 0
    for start, end in _spans(body):
        item = whole[start:end]
        if body.find(b"\\", start, end) >= 0:
            unescaped = bytes(item).replace(b"\\/", b"/")
            if b"\\" in unescaped:
                continue
            item = memoryview(unescaped)
        name = f"{prefix}{len(items)}"
        items[name] = item
        pieces += (whole[at:start], name.encode())
        at = end
    pieces.append(whole[at:])
    return Lifted(b"".join(pieces), items)


def _spans(body: bytes | bytearray) -> list[tuple[int, int]]:
    """Where large strings of the fields are, in order; each byte is looked at once for each field at most."""
    spans: list[tuple[int, int]] = []
    for name in _FIELDS:
        gaps = zip([0, *(end for _, end in spans)], [*(start for start, _ in spans), len(body)], strict=True)
        spans = sorted(spans + [span for begin, end in gaps for span in _strings(body, name, begin, end)])
    return spans


def _strings(body: bytes | bytearray, name: bytes, begin: int, end: int) -> list[tuple[int, int]]:
    """Where the large strings of a field are between two places: from behind their first quote to their last one."""
    found: list[tuple[int, int]] = []
    at = begin
    for _ in range(_MAX_LOOKED_AT):
        at = body.find(name, at, end)
        if at < 0:
            break
        at += len(name)
        opening = _TO_VALUE.match(body, at)
        if opening is None:
            continue
        closing = body.find(b'"', opening.end(), end)
        if closing - opening.end() >= MIN_LIFTED_BYTES:
            found.append((opening.end(), closing))
            at = closing
    return found
