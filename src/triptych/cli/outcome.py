"""Errors of commands."""

from collections.abc import Callable
from functools import partial


class CliError(Exception):
    """Failure in one line for the user. ``caller``: whether the user can fix it."""

    def __init__(self, message: str, *, caller: bool) -> None:
        super().__init__(message)
        self.caller = caller

    def __reduce__(self) -> tuple[Callable[..., "CliError"], tuple[str], dict[str, bool]]:
        """From a process of a pool: its keyword is no argument of exceptions, which are restored by those."""
        return partial(CliError, caller=self.caller), (str(self),), {}


class ClusterError(CliError):
    """The cluster did not start; the message names the obstacle, or the process and the end of its log."""

    def __init__(self, message: str, *, caller: bool = False) -> None:
        super().__init__(message, caller=caller)
