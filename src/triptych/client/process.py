"""Which process uses gRPC: it does not survive a fork, neither an open connection nor the library itself."""

import os

from triptych.errors import InvalidRequest

_user: int | None = None
"""The process that used gRPC, in it and in all that were forked from it."""


def use_grpc() -> None:
    """To be called before gRPC is. Raises InvalidRequest in a process that was forked from one that had used it."""
    global _user  # noqa: PLW0603 - what it is about is one of a process, too
    _user = _user or os.getpid()
    if _user != os.getpid():
        raise forked()


def forked() -> InvalidRequest:
    """What to raise in a process that was forked, of what its parent made."""
    return InvalidRequest(
        "this process was forked from one that used Triptych's client, and gRPC does not survive a fork: start "
        "processes by multiprocessing's 'spawn' method, or make the first client after the fork"
    )
