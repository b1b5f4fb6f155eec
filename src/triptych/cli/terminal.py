"""A terminal that may go away while something goes on that must end in order."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Within it, writing to standard output and standard error never fails."""
    out, err = cast("TextIO", _Lasting(sys.stdout)), cast("TextIO", _Lasting(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class _Lasting:
    """A text stream that nobody may read any more: writing to it never fails.

    A terminal that was closed, or a reader that left a pipe, turns every write into an OSError. From the first one on
    the file descriptor leads nowhere, so that what is still buffered cannot fail either, at the latest at exit.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._lead_nowhere()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._lead_nowhere()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lead_nowhere(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a stream without a descriptor
            descriptor = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
