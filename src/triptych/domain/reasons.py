"""Why something failed, in one line."""

import re

_MAX_CHARS = 200
_HIDDEN = re.compile(r"(?:[\w.+-]*/){2,}[\w.+-]*|0x[0-9a-fA-F]{4,}|\d+(?:\.\d+){3}(?::\d+)?", re.ASCII)
"""Paths and addresses."""


def reason_of(error: BaseException) -> str:
    """The last line of the traceback of an error's first cause. It is printable and short, without paths and addresses."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return shown(f"{type(error).__name__}: {text.strip()}" if text else type(error).__name__)


def shown(text: str) -> str:
    """A line of another program, printable and short, without paths and addresses."""
    plain = _HIDDEN.sub("...", text)
    plain = "".join(char if char.isprintable() else " " for char in plain)
    return plain if len(plain) <= _MAX_CHARS else f"{plain[: _MAX_CHARS - 3]}..."
