"""``python -m triptych.cli.leash PARENT_PID MODULE [ARGUMENT...]``: run a module that cannot outlive its parent.

Even when the parent is killed with SIGKILL and can do nothing any more, the kernel ends this process (PR_SET_PDEATHSIG
in prctl(2)). The parent's thread that started it must live as long as the parent: the signal is tied to the thread.
This is a program and not a hook between fork and exec, where a parent with threads could deadlock.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent_pid, module = int(argv[1]), argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the leash was on
        raise SystemExit(f"{module}: the process that started this one is gone")
    sys.argv = [module, *argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv)
