"""CPU cores and NUMA nodes of this process (ModServe, section 4.4).

An item is decoded by one thread. On a machine with several NUMA nodes each thread of a pool is pinned to the cores of
one node. So what it decodes lies in local memory.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

Cores = frozenset[int]

_NODES = Path("/sys/devices/system/node")
_MAX_CORES = 1 << 16


def usable_cores() -> Cores:
    """Cores that this process is allowed to run on."""
    return frozenset(os.sched_getaffinity(0))


def nodes(usable: Cores, directory: Path = _NODES) -> tuple[Cores, ...]:
    """The usable cores of each NUMA node; a single group where the system reports no nodes."""
    node_cores = []
    for node in sorted(directory.glob("node[0-9]*")):
        with suppress(OSError, ValueError):
            if cores := _parse((node / "cpulist").read_text()) & usable:
                node_cores.append(cores)
    return tuple(node_cores) if frozenset().union(*node_cores) == usable else (usable,)


def spread(threads: int, by_node: Sequence[Cores]) -> tuple[Cores, ...]:
    """The cores for each of ``threads`` threads: nodes get threads in proportion to their cores."""
    load = [0] * len(by_node)
    places = []
    for _ in range(threads):
        node = min(range(len(by_node)), key=lambda index: ((load[index] + 1) / len(by_node[index]), index))
        load[node] += 1
        places.append(by_node[node])
    return tuple(places)


def pinning(places: Sequence[Cores], pin: Callable[[int, Cores], None] = os.sched_setaffinity) -> Callable[[], None]:
    """An initializer for pool threads that pins each to the next of ``places``.

    It does nothing when all places are the same.
    """
    numbers = count()

    def start() -> None:
        if len(set(places)) > 1:
            with suppress(OSError):  # the process may have lost cores since: run on the others
                pin(0, places[next(numbers) % len(places)])

    return start


def _parse(text: str) -> Cores:
    """Parse the kernel's cpulist format, e.g. ``0-3,8``. Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < _MAX_CORES:
            raise ValueError(f"{part!r} is not a range of cores")
        cores.update(range(low, high + 1))
    return frozenset(cores)
