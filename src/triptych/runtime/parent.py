"""Processes that end with their parent."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> bool:
    """Make the kernel kill this process when its parent ends in any way; False if it has already ended.

    The parent's thread that started it must live as long as the parent: the signal is tied to the thread (prctl(2)).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent_pid
