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
    for a folder that cannot be used, and for what the body finds in it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CliError(f"cannot use {folder}: {error.strerror}", caller=True) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise CliError(f"cannot use {error.filename or folder}: {error.strerror}", caller=False) from None
    finally:
        os.close(descriptor)
