"""Detects use of gRPC after a fork, which neither its connections nor the library survive."""

import ctypes
import gc
import os
import sys

from triptych.errors import InvalidRequest

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
if "grpc" not in sys.modules and _FORK_SUPPORT not in os.environ:  # noqa: TID251 - gRPC reads it, not we
    # The default starts threads in the child that go on with the parent's connections. They crash: preparing them for
    # the fork is skipped while another thread waits in gRPC, as that of grpc.aio always does.
    os.environ[_FORK_SUPPORT] = "0"  # noqa: TID251 - read once, when the library is loaded
    import grpc.aio  # noqa: F401

    del os.environ[_FORK_SUPPORT]  # noqa: TID251

_user: int | None = None
"""Pid of the process that first used gRPC, here or in an ancestor it was forked in."""


def use_grpc() -> None:
    """Call before using gRPC. Raises InvalidRequest in a process forked from one that had used it."""
    global _user  # noqa: PLW0603 - a fact about the process
    _user = _user or os.getpid()
    if _user != os.getpid():
        raise forked()


def forked() -> InvalidRequest:
    """The error for using a parent's client in a forked process."""
    return InvalidRequest(
        "this process was forked from one that used Triptych's client, and gRPC does not survive a fork: start "
        "processes by multiprocessing's 'spawn' method, or make the first client after the fork"
    )


def _keep_inherited() -> None:
    """Keep the parent's channels and calls for ever in a child: gRPC crashes when it destroys them without its threads.

    Some are only reachable by the garbage collector, which would destroy them at the exit of the interpreter.
    """
    if _user is not None:
        for candidate in gc.get_objects():
            if type(candidate).__module__ == "grpc._cython.cygrpc":
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(candidate))


os.register_at_fork(after_in_child=_keep_inherited)
