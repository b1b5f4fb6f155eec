"""Event-loop lag: whatever blocks the loop delays every request of the process."""

import asyncio
import logging
from collections.abc import Iterable

from prometheus_client.core import Metric

from triptych.runtime.metrics import Metrics, gauge

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.25
_WINDOW_S = 60.0
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Measures four times a second how late the loop wakes a sleeping task."""

    def __init__(self, metrics: Metrics, *, warn_s: float) -> None:
        """A lag of ``warn_s`` or more is logged."""
        self._warn_s = warn_s
        self._seconds = metrics.histogram(
            "triptych_event_loop_lag_seconds", "How late the event loop ran what was due", buckets=_BUCKETS_S
        )
        self._window_end_s = 0.0
        self._max_s = 0.0
        self._max_before_s = 0.0
        metrics.watch(self._read)

    @property
    def max_s(self) -> float:
        """Worst lag of the last one to two minutes, so that no scrape misses a peak."""
        return max(self._max_s, self._max_before_s)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            now_s = loop.time()
            self._observe(max(0.0, now_s - due_s), now_s)

    def _observe(self, lag_s: float, now_s: float) -> None:
        self._seconds.observe(lag_s)
        if now_s >= self._window_end_s:
            self._window_end_s = now_s + _WINDOW_S
            self._max_before_s, self._max_s = self._max_s, 0.0
        self._max_s = max(self._max_s, lag_s)
        if lag_s >= self._warn_s:
            logger.warning("the event loop was blocked for %.3f s", lag_s)

    def _read(self) -> Iterable[Metric]:
        yield gauge("triptych_event_loop_lag_max_seconds", "Worst lag of the last one to two minutes", self.max_s)
