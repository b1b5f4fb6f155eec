"""A process that forks before, during or after its use of the SDK.

``python -m tests.unit.client.forking SCENARIO TARGET`` prints the output of parent and child and exits with the child's
status.
"""

import os
import sys
from collections.abc import Callable

from triptych import Client
from triptych.errors import TriptychError


def say(call: Callable[[], object]) -> None:
    try:
        print(call(), flush=True)  # noqa: T201 - what the test reads
    except TriptychError as error:
        print(f"{type(error).__name__}: {error.message}", flush=True)  # noqa: T201


def ask(target: str) -> str:
    with Client(target, timeout_s=5) as client:
        return client.chat("Hi").text


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child that runs the work and exits as the interpreter does."""
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> int:
    scenario, target = sys.argv[1:]
    if scenario == "first client in the child":
        unused = Client(target)
        status = in_child(lambda: say(lambda: ask(target)))
        unused.close()
    elif scenario == "after the parent's close":
        say(lambda: ask(target))
        status = in_child(lambda: say(lambda: ask(target)))
    elif scenario == "beside the parent's client":
        with Client(target) as client:
            say(lambda: client.chat("Hi").text)
            status = in_child(lambda: say(lambda: ask(target)))
    else:
        with Client(target) as client:
            say(lambda: client.chat("Hi").text)

            def use_and_close() -> None:
                say(lambda: client.chat("Hi", timeout_s=1))
                client.close()

            status = in_child(use_and_close)
    say(lambda: ask(target) if scenario != "first client in the child" else "")
    return status


if __name__ == "__main__":
    sys.exit(main())
