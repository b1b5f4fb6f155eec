"""Output that survives the loss of its terminal, so that a command can still end in order."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast


@contextlib.contextmanager
def unfailing_output() -> Iterator[None]:
    """Make writing to standard output and standard error never fail in the body."""
    out, err = cast("TextIO", _UnfailingStream(sys.stdout)), cast("TextIO", _UnfailingStream(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class _UnfailingStream:
    """A text stream whose writes never fail.

    Once the terminal or the reader of a pipe is gone, every write is an OSError. After the first one the file
    descriptor points to the null device, so that flushing buffers cannot fail either.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._redirect_to_null()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._redirect_to_null()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _redirect_to_null(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a stream without a descriptor
            descriptor = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
