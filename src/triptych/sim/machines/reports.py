"""Load reports of an instance to the router: at once after a change, no more often than the settings say, and sometimes without one."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import inf

from triptych.domain.instance import InstanceLoad
from triptych.runtime.watched_value import ReportIntervals

from ..agenda import Agenda  # noqa: TID252 - of the simulator

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
        self._read_s = 0.0
        self._rests_until_s = inf
        """When the next report may be sent; infinite until the last one has arrived."""
        self._due_s = inf
        """When it will be sent, or whether there is anything new is looked at; infinite where nothing is to change."""
        self._beats_s = inf
        """When ``_beat`` comes."""
        self._changes_s = _NO_TIMES
        """When the load changes by itself, in order."""

    def start(self, deliver: Callable[[InstanceLoad], None]) -> None:
        """The watch begins. ``deliver`` takes each report."""
        self._deliver = deliver
        self._send()

    def notify(self) -> None:
        """The load may have changed."""
        if not self._changed:
            self._changed = True
            self._plan(self._rests_until_s)

    def changes(self, times_s: Sequence[float]) -> None:
        """From now on the load changes by itself at these times, and not at those that were said before."""
        self._changes_s = times_s
        if times_s:
            self._plan(max(self._rests_until_s, times_s[0]))

    def _plan(self, at_s: float) -> None:
        """See at that time whether there is anything to send."""
        agenda = self._agenda
        if at_s < self._due_s:
            self._due_s = at_s
            if at_s <= agenda.now_s:
                agenda.soon(self._see, at_s)
            else:
                agenda.at(at_s, self._see, at_s)

    def _see(self, due_s: float) -> None:
        if due_s != self._due_s:
            return
        self._due_s = inf
        if self._changed or self._next_change_s <= self._agenda.now_s:
            self._send()
        else:
            self._plan(self._next_change_s)

    @property
    def _next_change_s(self) -> float:
        """When the load changes by itself for the first time after the last report; infinite if it does not."""
        times_s = self._changes_s
        place = bisect_right(times_s, self._read_s)
        return times_s[place] if place < len(times_s) else inf

    def _send(self) -> None:
        self._changed, self._rests_until_s, self._due_s = False, inf, inf
        agenda = self._agenda
        self._read_s = agenda.now_s
        agenda.after(self._control_s, self._arrive, self._read())

    def _arrive(self, load: InstanceLoad) -> None:
        self._deliver(load)
        agenda, intervals = self._agenda, self._intervals
        rests_until_s = self._rests_until_s = agenda.now_s + intervals.load_min_interval_s
        self._plan(rests_until_s if self._changed else max(rests_until_s, self._next_change_s))
        if self._beats_s == inf:
            self._beats_s = rests_until_s + intervals.load_max_interval_s
            agenda.at(self._beats_s, self._beat)

    def _beat(self) -> None:
        """Send one if none was sent for so long."""
        beats_s = self._rests_until_s + self._intervals.load_max_interval_s
        if beats_s == inf:  # one is under way
            self._beats_s = inf
        elif beats_s > self._agenda.now_s:
            self._beats_s = beats_s
            self._agenda.at(beats_s, self._beat)
        else:
            self._beats_s = inf
            self._send()
