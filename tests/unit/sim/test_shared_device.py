"""Engines that compute at the same time on one device, in virtual time."""

import asyncio
from collections.abc import Sequence

import pytest

from triptych.sim.shared_device import SharedDevice
from triptych.virtual import virtual_time


def ends(speed: float, pieces: Sequence[tuple[float, float]]) -> list[float]:
    """When each piece of work is done; given are its beginning and what it takes alone."""

    async def main() -> list[float]:
        device, loop = SharedDevice(speed), asyncio.get_running_loop()

        async def work(begin_s: float, cost_s: float) -> float:
            await asyncio.sleep(begin_s)
            await device.run(cost_s)
            return loop.time()

        return list(await asyncio.gather(*(work(*piece) for piece in pieces)))

    return virtual_time.run(main())


def test_work_alone_has_the_whole_device() -> None:
    assert ends(0.5, [(1.0, 2.0), (4.0, 1.0)]) == pytest.approx([3.0, 5.0])


@pytest.mark.parametrize(("speed", "both_s"), [(0.5, 4.0), (0.8, 2.5), (1.0, 2.0)])
def test_two_pieces_slow_each_other_as_stated(speed: float, both_s: float) -> None:
    assert ends(speed, [(0.0, 2.0), (0.0, 2.0)]) == pytest.approx([both_s, both_s])


def test_the_rest_runs_alone_once_the_other_has_ended() -> None:
    assert ends(0.5, [(0.0, 3.0), (1.0, 1.0)]) == pytest.approx([4.0, 3.0])


def test_many_are_together_as_fast_as_two() -> None:
    assert ends(0.75, [(0.0, 3.0)] * 4) == pytest.approx([8.0] * 4)


def test_a_caller_that_leaves_does_not_stop_the_work() -> None:
    async def main() -> float:
        device = SharedDevice(0.5)
        device.run(1.0).cancel()
        await device.run(1.0)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(2.0)
