"""``python -m triptych.cli.child PARENT_PID MODULE [ARGUMENT...]``: run a module that ends with its parent.

The kernel ends this process even when the parent is killed with SIGKILL.
This is a program and not a hook between fork and exec, where a parent with threads could deadlock.
"""

import os
import runpy
import sys

from triptych.runtime.parent import end_with_parent


def child_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Command that runs a module as a child of this process. Start it from a thread that lives as long as the child."""
    return (sys.executable, "-m", "triptych.cli.child", str(os.getpid()), module, *arguments)


def main(argv: list[str]) -> None:
    parent_pid, module = int(argv[1]), argv[2]
    if not end_with_parent(parent_pid):  # the parent has already ended
        raise SystemExit(f"{module}: the process that started this one is gone")
    sys.argv = [module, *argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv)
