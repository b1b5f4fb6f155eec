"""Errors of commands."""


class CliError(Exception):
    """Failure in one line for the user. ``caller``: whether the user can fix it."""

    def __init__(self, message: str, *, caller: bool) -> None:
        super().__init__(message)
        self.caller = caller


class ClusterError(CliError):
    """The cluster did not start; the message names the obstacle, or the process and the end of its log."""

    def __init__(self, message: str, *, caller: bool = False) -> None:
        super().__init__(message, caller=caller)
