"""Benchmarks end by SIGTERM as they end by Ctrl-C: what they have started is stopped, and temporary folders go."""

import signal
from types import FrameType


def by_sigterm() -> None:
    """From now on SIGTERM does what SIGINT does: it cancels the running event loop's work, else interrupts.

    Once: ``timeout`` sends it twice, and what is started must be stopped.
    """
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    handler = signal.getsignal(signal.SIGINT)  # not a function where a shell ignores it for jobs in the background
    (handler if callable(handler) else signal.default_int_handler)(number, frame)
