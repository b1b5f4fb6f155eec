"""What the runs of the fidelities have in common that are driven by a list of events."""

import time
from collections.abc import Callable
from typing import Protocol

from .agenda import Agenda, rarely_collected
from .outcome import Outcome


class EventRun(Protocol):
    """A run whose events are set."""

    @property
    def agenda(self) -> Agenda: ...

    def interrupt(self) -> None:
        """The outcome has what has ended."""
        ...

    def outcome(self, took_s: float) -> Outcome: ...


def carry_out(make: Callable[[], EventRun]) -> Outcome:
    """Make a run and let everything happen in it. Ctrl-C ends it."""
    began_s = time.process_time()
    with rarely_collected():
        run = make()
        try:
            run.agenda.run()
        except KeyboardInterrupt:
            run.interrupt()
        return run.outcome(time.process_time() - began_s)
