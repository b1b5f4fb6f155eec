"""Transfers that share links, in virtual time."""

import asyncio
from collections.abc import Sequence

import pytest

from triptych.sim.network import Hosts, LinkSpeed, SharedLinks, Topology
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


def test_no_bytes_take_no_more_than_the_latency() -> None:
    assert times(SPEEDS, [(0.5, ("a",), 0), (0.5, ("far",), 0)]) == pytest.approx([0.5, 1.0])


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


LINK, WITHIN_HOST = LinkSpeed(100.0), LinkSpeed(1000.0)


def placed(hosts: Hosts | None, *devices: int) -> Topology:
    """Instances *0*, *1*, ... of so many devices."""
    topology = Topology(hosts)
    for name, count in enumerate(devices):
        topology.enter(str(name), count, LINK, WITHIN_HOST, str(name))
    return topology


def test_without_hosts_each_instance_has_a_link_for_each_direction() -> None:
    topology = placed(None, 1, 1)
    assert topology.path("0", "1") == ("out of 0", "into 1")
    assert topology.host("0") == ""
    assert set(topology.speeds) == {"out of 0", "into 0", "out of 1", "into 1"}


def test_an_instance_gets_the_first_host_that_has_room() -> None:
    topology = placed(Hosts(8), 4, 8, 2, 4, 2)
    assert [topology.host(str(name)) for name in range(5)] == ["host-1", "host-2", "host-1", "host-3", "host-1"]


def test_devices_of_an_instance_that_left_are_given_to_another() -> None:
    topology = placed(Hosts(2), 2, 2)
    topology.leave("0", 2)
    topology.enter("2", 2, LINK, WITHIN_HOST, "2")
    assert topology.host("2") == "host-1"
    topology.enter("0", 2, LINK, WITHIN_HOST, "0")
    assert topology.host("0") == "host-3"


def test_within_a_host_transfers_do_not_take_its_network() -> None:
    topology = placed(Hosts(2, LinkSpeed(150.0)), 1, 1, 1)
    assert topology.speeds[topology.path("0", "1")[0]] == WITHIN_HOST
    assert times(topology.speeds, [(0.0, topology.path("0", "1"), 1000), (0.0, topology.path("0", "2"), 100)]) == [
        1.0,
        1.0,
    ]


def test_the_instances_of_a_host_share_its_network() -> None:
    topology = placed(Hosts(2, LinkSpeed(150.0)), 1, 1, 1, 1)
    both = [(0.0, topology.path("0", "2"), 150), (0.0, topology.path("1", "3"), 150)]
    assert times(topology.speeds, both[:1]) == pytest.approx([1.5])
    assert times(topology.speeds, both) == pytest.approx([2.0, 2.0])
    back = (0.0, topology.path("3", "0"), 150)
    assert times(topology.speeds, [both[0], back]) == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize("hosts", [None, Hosts(2, LinkSpeed(150.0))])
def test_an_instance_on_the_devices_of_another_has_its_links(hosts: Hosts | None) -> None:
    topology = placed(hosts, 2, 2)
    topology.enter("2", 0, LINK, WITHIN_HOST, "1")
    assert topology.host("2") == topology.host("1")
    assert topology.path("2", "0") == topology.path("1", "0")
    assert [topology.speeds[link] for link in topology.path("2", "1")] == [WITHIN_HOST, WITHIN_HOST]
    topology.leave("2", 0)
