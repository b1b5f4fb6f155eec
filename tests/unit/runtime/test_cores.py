import asyncio
import threading
from collections import Counter
from pathlib import Path

import pytest

from triptych.runtime.cores import Cores, nodes, pinning, spread, usable_cores
from triptych.runtime.offload import ThreadOffload


def topology(directory: Path, **lists: str) -> Path:
    for name, cores in lists.items():
        (directory / name).mkdir()
        (directory / name / "cpulist").write_text(cores)
    return directory


def cores(first: int, last: int) -> Cores:
    return frozenset(range(first, last + 1))


def test_numa_nodes_are_parsed_from_the_kernels_format(tmp_path: Path) -> None:
    found = nodes(cores(0, 15), topology(tmp_path, node0="0-3,8-11\n", node1="4-7,12-15\n"))
    assert found == (cores(0, 3) | cores(8, 11), cores(4, 7) | cores(12, 15))


def test_only_cores_of_the_affinity_mask_count(tmp_path: Path) -> None:
    directory = topology(tmp_path, node0="0-3", node1="4-7", node2="\n")
    assert nodes(frozenset({2, 3, 4}), directory) == (frozenset({2, 3}), frozenset({4}))
    assert nodes(cores(4, 7), directory) == (cores(4, 7),)


@pytest.mark.parametrize("lists", [{}, {"node0": "a-b"}, {"node0": "0-99999999"}, {"node0": "0-1"}])
def test_without_topology_all_cores_are_one_node(tmp_path: Path, lists: dict[str, str]) -> None:
    assert nodes(cores(0, 3), topology(tmp_path, **lists)) == (cores(0, 3),)


def test_threads_are_spread_in_proportion() -> None:
    ranges = (cores(0, 3), cores(4, 7))
    assert spread(4, ranges) == (ranges[0], ranges[1], ranges[0], ranges[1])
    assert spread(1, ranges) == (ranges[0],)
    uneven = (cores(0, 5), cores(6, 7))
    assert [place == uneven[1] for place in spread(8, uneven)].count(True) == 2
    assert spread(0, ranges) == ()


async def test_each_thread_of_a_pool_is_pinned_to_one_node() -> None:
    pinned: dict[int, Cores] = {}
    places = spread(4, (cores(0, 1), cores(2, 3)))
    together = threading.Barrier(4)
    """A barrier that no thread passes before all four threads run."""

    def work() -> int:
        together.wait(timeout=60)
        return threading.get_ident()

    def pin(_: int, place: Cores) -> None:
        assert threading.get_ident() not in pinned, "a thread is pinned once"
        pinned[threading.get_ident()] = place

    offload = ThreadOffload(4, name="pinned", starting=pinning(places, pin))
    try:
        for _ in range(2):
            ran = await asyncio.gather(*(offload.run(work) for _ in places))
            assert set(ran) == set(pinned)
    finally:
        offload.close()
    assert Counter(pinned.values()) == Counter(places)


def test_a_single_node_needs_no_pinning() -> None:
    pinned: list[Cores] = []
    pinning(spread(3, (cores(0, 3),)), lambda _, place: pinned.append(place))()
    assert pinned == []


def test_missing_cores_are_ignored() -> None:
    def gone(_: int, __: Cores) -> None:
        raise OSError

    pinning(spread(2, (cores(0, 0), cores(1, 1))), gone)()


def test_this_process_has_cores() -> None:
    usable = usable_cores()
    assert usable
    assert frozenset().union(*nodes(usable)) == usable
