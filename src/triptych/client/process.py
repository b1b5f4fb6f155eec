"""Detects use of gRPC after a fork, which neither its connections nor the library survive."""

import os

from triptych.errors import InvalidRequest

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
