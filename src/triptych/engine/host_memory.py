"""Memory of the host that this process may still take: what the machine has, and what the control groups of the process allow."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_KIB = 1024
_ROOT = Path("/")


def available_nbytes(root: Path = _ROOT) -> int | None:
    """The least of both; page cache that can be dropped counts as free. None if the system does not tell.

    Control groups are those of version 2, up to the mounted root. ``root``: of the file system.
    """
    available = [*_of_machine(root), *_of_groups(root)]
    return min(available) if available else None


def _of_machine(root: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * _KIB


def _of_groups(root: Path) -> Iterator[int]:
    mounted = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own_group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
        if own_group is None:
            return
        group = mounted / own_group
        for folder in (group, *group.parents):
            yield from _of_group(folder)
            if folder == mounted:
                return


def _of_group(group: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return
        taken = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield max(0, int(limit) - taken + int(statistics.get("inactive_file", 0)))
