"""The peak load of one pool by hour, over the last weeks."""

from triptych.domain.decision import PoolView
from triptych.domain.history import HOURS_OF_WEEK, WEEKS, HourLoad, KeptHistory

_MAX_HOURS = WEEKS * HOURS_OF_WEEK


class LoadHistory:
    """Owner of a pool's peak load by hour, of the last weeks.

    ``observe`` is the only mutator. Hours are counted since the beginning of 1970, UTC.
    """

    def __init__(self, kept: KeptHistory = KeptHistory()) -> None:  # noqa: B008 - immutable
        self._peaks = {hour.hour: hour.peak_per_s for hour in kept.hours[-_MAX_HOURS:]}
        self._capacity_per_s = kept.capacity_per_s

    def observe(self, view: PoolView, hour: int) -> None:
        """Observe the view that a decision was made from."""
        if view.facts.capacity_per_s is not None:
            self._capacity_per_s = view.facts.capacity_per_s
        if view.load is None:
            return
        self._peaks[hour] = max(self._peaks.get(hour, 0.0), view.load.short_per_s)
        while len(self._peaks) > _MAX_HOURS:
            del self._peaks[min(self._peaks)]

    @property
    def capacity_per_s(self) -> float | None:
        """Capacity of one replica when it was known last, tokens per second."""
        return self._capacity_per_s

    def same_hour(self, hour: int) -> tuple[float, ...]:
        """The peaks of this hour of the week in earlier weeks."""
        earlier = (hour - week * HOURS_OF_WEEK for week in range(1, WEEKS))
        return tuple(self._peaks[hour] for hour in earlier if hour in self._peaks)

    def kept(self) -> KeptHistory:
        hours = tuple(HourLoad(hour, peak) for hour, peak in sorted(self._peaks.items()))
        return KeptHistory(hours, self._capacity_per_s)
