"""Texts of others in one line: why something failed, what a process said last."""

import re

_MAX_CHARS = 200
_MAX_READ_CHARS = 5 * _MAX_CHARS
"""Most characters of a text that are read, as finding paths in a long one takes the square of its length."""
_MAX_CAUSES = 16
"""An error may be its own cause."""
_HIDDEN = re.compile(r"(?:[\w.+-]*/){2,}[\w.+-]*|0x[0-9a-fA-F]{4,}|\d+(?:\.\d+){3}(?::\d+)?", re.ASCII)
"""Paths and addresses."""


def reason_of(error: BaseException) -> str:
    """The type of an error's first cause and the first line of its message, as ``shown``."""
    for _ in range(_MAX_CAUSES):
        error = error.__cause__ or error
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return shown(f"{type(error).__name__}: {text.strip()}" if text else type(error).__name__)


def shown(text: str) -> str:
    """A line of another program, printable and short, without paths and addresses."""
    plain = printable(_HIDDEN.sub("...", text[:_MAX_READ_CHARS]))
    return plain if len(plain) <= _MAX_CHARS else f"{plain[: _MAX_CHARS - 3]}..."


def printable(text: str) -> str:
    """``text`` on one line: what cannot be printed is escaped as Python does."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
