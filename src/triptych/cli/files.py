"""Files attached to a question on the command line."""

import os
import re
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
