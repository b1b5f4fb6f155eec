"""Transfers that share links, in virtual time."""

import asyncio
from collections.abc import Sequence

import pytest

from triptych.sim.network import LinkSpeed, SharedLinks
from triptych.virtual import virtual_time


def times(speeds: dict[str, LinkSpeed], transfers: Sequence[tuple[float, tuple[str, ...], int]]) -> list[float]:
    """When each transfer ends; given are its beginning, links and bytes."""

    async def main() -> list[float]:
        links = SharedLinks(speeds)
        loop = asyncio.get_running_loop()

        async def one_transfer(begin_s: float, path: tuple[str, ...], nbytes: int) -> float:
            await asyncio.sleep(begin_s)
            await links.transfer(path, nbytes)
            return loop.time()

        return list(await asyncio.gather(*(one_transfer(*transfer) for transfer in transfers)))

    return virtual_time.run(main())


SPEEDS = {"a": LinkSpeed(100.0), "b": LinkSpeed(100.0), "slow": LinkSpeed(10.0), "far": LinkSpeed(1000.0, 0.5)}


def test_a_transfer_alone_has_the_whole_link() -> None:
    assert times(SPEEDS, [(1.0, ("a",), 200)]) == pytest.approx([3.0])


def test_the_slowest_link_decides_and_latencies_add_up() -> None:
    assert times(SPEEDS, [(0.0, ("a", "slow", "far"), 50)]) == pytest.approx([5.5])


def test_transfers_over_one_link_share_it_and_speed_up_as_others_end() -> None:
    ends = times(SPEEDS, [(0.0, ("a",), 100), (0.0, ("a",), 200), (1.0, ("b",), 100)])
    assert ends == pytest.approx([2.0, 3.0, 2.0])


def test_a_transfer_slows_those_that_run() -> None:
    assert times(SPEEDS, [(0.0, ("a", "b"), 200), (1.0, ("b",), 50)]) == pytest.approx([2.5, 2.0])


def test_what_has_no_known_link_takes_no_time() -> None:
    assert times(SPEEDS, [(0.5, ("nowhere",), 10**12), (0.5, ("a",), 0)]) == pytest.approx([0.5, 0.5])


def test_a_cancelled_transfer_leaves_its_share_to_others() -> None:
    async def main() -> tuple[float, int]:
        links = SharedLinks(SPEEDS)
        async with asyncio.TaskGroup() as group:
            left = group.create_task(links.transfer(("a",), 1000))
            group.create_task(links.transfer(("a",), 100))
            await asyncio.sleep(1.0)
            left.cancel()
        return asyncio.get_running_loop().time(), links.flows.moved["a"]

    ended_s, moved = virtual_time.run(main())
    assert ended_s == pytest.approx(1.5)
    assert moved == 100


def test_many_transfers_move_all_bytes() -> None:
    async def main() -> float:
        links = SharedLinks({"a": LinkSpeed(1000.0), "b": LinkSpeed(500.0)})
        await asyncio.gather(*(links.transfer(("a", "b") if number % 3 else ("a",), 10) for number in range(300)))
        assert links.flows.moved["a"] == 3000
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(200 * 10 / 500.0, rel=0.01)
