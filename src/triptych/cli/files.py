"""Files attached to a question on the command line."""

import os
import re
import stat
from pathlib import Path

from triptych.cli.outcome import CliError

_URL = re.compile(r"(https?|ftp|file|s3|gs):/+|data:", re.IGNORECASE)
"""Also with one slash, since ``Path`` collapses two."""


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
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise CliError(f"{name} is not a file: it does not exist", caller=True) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CliError(f"{name} is not a file: {reason}", caller=True) from None
    if stat.S_ISDIR(mode):
        raise CliError(f"{name} is not a file: it is a directory", caller=True)
    if not stat.S_ISREG(mode):
        raise CliError(f"{name} is not a file: it is a device, a pipe or a socket", caller=True)
    if not os.access(path, os.R_OK):
        raise CliError(f"cannot read {name}: Permission denied", caller=True)
    return path
