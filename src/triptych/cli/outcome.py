"""How commands fail."""


class CliError(Exception):
    """One line for the person at the terminal. ``caller`` tells whether it is they who can do something about it."""

    def __init__(self, message: str, *, caller: bool) -> None:
        super().__init__(message)
        self.caller = caller


class ClusterError(CliError):
    """The cluster did not come up; the message names what is in the way, or the process and the end of its log."""

    def __init__(self, message: str) -> None:
        super().__init__(message, caller=False)
