"""Files that an operator names: settings, keys, members, profiles, models, media. Read once, whole, and within a limit."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any


class BadFile(ValueError):
    """The file cannot be used. The message is a phrase that goes after the file's name: ``is a directory``."""


def check_regular(path: Path, limit_nbytes: int | None = None) -> None:
    """Raises BadFile unless it is a regular file, of at most so many bytes. A device or a pipe may have no end, or nobody who
    writes to it.
    """
    try:
        if not path.exists():
            raise BadFile("does not exist")
        if not path.is_file():
            raise BadFile("is a directory" if path.is_dir() else "is a device, a pipe or a socket, not a regular file")
        if limit_nbytes is not None and path.stat().st_size > limit_nbytes:
            raise BadFile(f"has more than {limit_nbytes} bytes")
    except OSError as error:
        raise BadFile(f"cannot be read: {error.strerror}") from None


def read_bytes(path: Path, limit_nbytes: int) -> bytes:
    """The content of a regular file. Raises BadFile."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            data = file.read(limit_nbytes + 1)
    except OSError as error:
        raise BadFile(f"cannot be read: {error.strerror}") from None
    if len(data) > limit_nbytes:
        raise BadFile(f"has more than {limit_nbytes} bytes")
    return data


def read_text(path: Path, limit_nbytes: int) -> str:
    """The content of a file of UTF-8 text. Raises BadFile."""
    try:
        return read_bytes(path, limit_nbytes).decode()
    except UnicodeDecodeError as error:
        raise BadFile(f"is not UTF-8 text: byte {error.start} cannot be decoded") from None


def read_json(path: Path, limit_nbytes: int) -> Any:
    """The value in a JSON file. Raises BadFile."""
    return _parsed("JSON", json.loads, read_text(path, limit_nbytes))


def read_toml(path: Path, limit_nbytes: int) -> dict[str, Any]:
    """The document in a TOML file. Raises BadFile."""
    document: dict[str, Any] = _parsed("TOML", tomllib.loads, read_text(path, limit_nbytes))
    return document


def _parsed(language: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise BadFile(f"is not {language} that can be read: it nests too deep") from None
    except ValueError as error:  # also numbers with more digits than Python reads
        raise BadFile(f"is not {language}: {error}") from None
