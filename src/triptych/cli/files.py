"""Files on the command line: those to read, and those to write at the end."""

import importlib.util
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path

from triptych.cli.outcome import CliError
from triptych.files import BadFile, check_regular

_URL = re.compile(r"(https?|ftp|file|s3|gs):/+|data:", re.IGNORECASE)
"""Pattern of an address, also with one slash, since ``Path`` collapses two."""


def local_file(named: str | Path) -> Path:
    """A regular, readable file: a device or pipe may have no end. Raises CliError."""
    name = str(named)
    if url := _URL.match(name):
        scheme = f"{url[1]}://" if url[1] else url[0]
        raise CliError(
            f"{scheme}{name[url.end() :][:80]} is not a file: only files of this machine are taken, no URLs",
            caller=True,
        )
    path = Path(name).expanduser()
    try:
        check_regular(path)
    except BadFile as error:
        raise CliError(f"{name} {error}", caller=True) from None
    if not os.access(path, os.R_OK):
        raise CliError(f"{name} cannot be read: Permission denied", caller=True)
    return path


def make_room(outputs: Mapping[str, Path | None], drawn: Container[str] = ()) -> None:
    """Make the directories of files that are going to be written, and nothing else. Raises CliError where one cannot be written.

    ``outputs`` are by option; those of options in ``drawn`` need matplotlib.
    """
    given = {option: path for option, path in outputs.items() if path is not None}
    for option in given:
        if option in drawn and importlib.util.find_spec("matplotlib") is None:
            raise CliError(f"{option} needs matplotlib: install Triptych's extra 'bench'", caller=True)
    if len({path.absolute() for path in given.values()}) < len(given):
        raise CliError(f"{', '.join(given)}: each needs a file of its own, two name one file", caller=True)
    for option, path in given.items():
        make_directory_of(path, f"{option}: ")


def make_directory_of(path: Path, said_before: str = "") -> None:
    """Make the directory of a file that is going to be written. Raises CliError where it cannot be written."""
    directory = path.absolute().parent
    fault = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        fault = "a file is where its directory would be"
    except OSError as error:
        fault = error.strerror or str(error)
    if not fault and not os.access(path if path.exists() else directory, os.W_OK):
        fault = "Permission denied"
    if fault:
        raise CliError(f"{said_before}cannot write {path}: {fault}", caller=True)
