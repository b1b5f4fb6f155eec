import asyncio
import logging

import pytest

from triptych.runtime.lag import LoopLag
from triptych.runtime.metrics import Metrics
from triptych.virtual.virtual_time import run


class JumpingClock:
    """A clock that jumps ahead while tasks sleep, as if a callback had blocked the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop) -> None:
        self._time = loop.time
        self._ahead_s = 0.0
        monkeypatch.setattr(loop, "time", lambda: self._time() + self._ahead_s)

    def block(self, seconds: float) -> None:
        self._ahead_s += seconds


def test_lag_is_measured_kept_and_logged_above_the_threshold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()

    async def scenario() -> None:
        lag = LoopLag(metrics, warn_s=0.5)
        hiccups = JumpingClock(monkeypatch, asyncio.get_running_loop())
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(lag.run())
            await asyncio.sleep(1.1)
            assert lag.max_s < 0.001
            hiccups.block(0.4)
            await asyncio.sleep(0.5)
            assert 0.15 <= lag.max_s <= 0.4  # up to one interval of it was regular sleep
            assert not caplog.records
            hiccups.block(2.0)
            await asyncio.sleep(0.5)
            assert 1.75 <= lag.max_s <= 2.0
            await asyncio.sleep(130)
            assert lag.max_s < 0.001  # more than two minutes ago
            watching.cancel()

    with caplog.at_level(logging.WARNING, logger="triptych.runtime.lag"):
        run(scenario())
    (record,) = caplog.records
    assert "the event loop was blocked for" in record.getMessage()
    text = metrics.render().decode()
    assert 'triptych_event_loop_lag_seconds_bucket{le="0.5"} ' in text
    assert "triptych_event_loop_lag_max_seconds" in text
