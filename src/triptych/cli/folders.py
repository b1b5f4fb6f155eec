"""Folders that several processes of this machine write."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator
from pathlib import Path

from triptych.cli.outcome import CliError


@contextlib.contextmanager
def sole_writer(folder: Path, *, waits: Callable[[], None] = lambda: None) -> Generator[None]:
    """Makes ``folder``, and waits for others that write to it: ``waits`` is called before, if there are any. Raises CliError
    for a folder that cannot be used, and for an OSError of the body that names it or something in it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CliError(f"cannot use {folder}: {error.strerror}", caller=True) from None
    try:
        if not _locked(folder, descriptor, fcntl.LOCK_NB):
            waits()
            _locked(folder, descriptor)
        yield
    except OSError as error:
        named = error.filename
        if not isinstance(named, str | Path) or not Path(named).absolute().is_relative_to(folder.absolute()):
            raise
        raise CliError(f"cannot use {named}: {error.strerror}", caller=False) from None
    finally:
        os.close(descriptor)


def _locked(folder: Path, descriptor: int, how: int = 0) -> bool:
    """Take the lock; False if another process has it. Raises CliError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
    except BlockingIOError:
        return False
    except OSError as error:
        raise CliError(f"cannot lock {folder}: {error.strerror}", caller=False) from None
    return True
