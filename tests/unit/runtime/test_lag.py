import asyncio
import logging

import pytest

from triptych.runtime.lag import LoopLag
from triptych.runtime.metrics import Metrics
from triptych.virtual.virtual_time import VirtualTimeLoop, run


def test_lag_is_measured_kept_and_logged_above_the_threshold(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()

    async def scenario() -> None:
        lag = LoopLag(metrics, warn_s=0.5)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(lag.run())
            await asyncio.sleep(1.1)
            assert lag.max_s < 0.001
            loop.block(0.4)
            await asyncio.sleep(0.5)
            assert 0.15 <= lag.max_s <= 0.4  # up to one interval of it was regular sleep
            assert not caplog.records
            loop.block(2.0)
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
