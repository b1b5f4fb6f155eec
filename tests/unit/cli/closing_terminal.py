import os
import subprocess
import sys
from pathlib import Path
from typing import Self

import psutil


class Terminal:
    """A pseudo terminal that is the controlling terminal of a process."""

    def __init__(self, arguments: list[str], *, cwd: Path, env: dict[str, str]) -> None:
        self.master, slave = os.openpty()
        take_terminal = (
            "import fcntl,os,signal,sys,termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"  # ignored under nohup
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", take_terminal, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def read_until(self, text: str) -> None:
        while text not in self.shown:
            try:
                self.shown += os.read(self.master, 1 << 16).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended before it said {text!r}:\n{self.shown}") from None

    def children(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def close(self) -> None:
        """Hangs up, as when the terminal's window is closed."""
        master, self.master = self.master, -1
        if master >= 0:
            os.close(master)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
