"""Load reports of an instance to the router: at once after a change, no more often than the settings say, and sometimes without one."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from triptych.domain.instance import InstanceLoad
from triptych.runtime.watched_value import ReportIntervals

from .agenda import Agenda

_NO_TIMES: Sequence[float] = ()


class Reporter:
    """``runtime.watched_value.WatchedValue`` with one watcher, behind a link."""

    def __init__(
        self,
        agenda: Agenda,
        read: Callable[[], InstanceLoad],
        intervals: ReportIntervals,
        control_s: float,
    ) -> None:
        self._agenda = agenda
        self._read = read
        self._deliver: Callable[[InstanceLoad], None]
        self._intervals = intervals
        self._control_s = control_s
        self._changed = False
        self._waits = False
        self._sent = 0
        """Number of reports; tells a time limit that is out of date."""
        self._read_s = 0.0
        self._changes_s = _NO_TIMES
        """When the load changes by itself, in order."""

    def start(self, deliver: Callable[[InstanceLoad], None]) -> None:
        """The watch begins. ``deliver`` takes each report."""
        self._deliver = deliver
        self._send()

    def notify(self) -> None:
        """The load may have changed."""
        self._changed = True
        if self._waits:
            self._waits = False
            self._agenda.soon(self._send)

    def changes(self, times_s: Sequence[float]) -> None:
        """From now on the load changes by itself at these times, and not at those that were said before."""
        self._changes_s = times_s
        if self._waits and times_s:
            self._agenda.at(times_s[0], self._send_if_waiting, self._sent)

    def _send(self) -> None:
        self._changed = self._waits = False
        self._sent += 1
        agenda = self._agenda
        self._read_s = agenda.now_s
        agenda.after(self._control_s, self._arrive, self._read())

    def _arrive(self, load: InstanceLoad) -> None:
        self._deliver(load)
        self._agenda.after(self._intervals.load_min_interval_s, self._rested)

    def _rested(self) -> None:
        agenda, times_s = self._agenda, self._changes_s
        place = bisect_right(times_s, self._read_s)
        if self._changed or (place < len(times_s) and times_s[place] <= agenda.now_s):
            self._send()
            return
        self._waits = True
        if place < len(times_s):
            agenda.at(times_s[place], self._send_if_waiting, self._sent)
        agenda.after(self._intervals.load_max_interval_s, self._send_if_waiting, self._sent)

    def _send_if_waiting(self, sent: int) -> None:
        if self._waits and sent == self._sent:
            self._send()
