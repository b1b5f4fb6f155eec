"""Bounds of the sizes of pools, as people write them."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from triptych.domain.decision import Bounds
from triptych.domain.scaling import PoolName, parse_kind

K = TypeVar("K")
MAX_POOL_SIZE = 4096
_COUNT = re.compile("[0-9]{1,9}")


def bounds_of(pool: PoolName, entries: Sequence[str]) -> Bounds | None:
    """Bounds of the pool's own entry, else of its role's; None without either. Raises ValueError."""
    bounds = dict(map(parse_bounds, entries))
    return bounds.get(str(pool)) or bounds.get(pool.kind) or bounds.get(pool.role.value)


def planned_most(
    sizes: Mapping[K, int],
    devices: Mapping[K, str],
    degrees: Mapping[K, int],
    available: Mapping[str, int | None],
) -> dict[K, int]:
    """The largest sizes of a plan's pools, by role or kind: with what its devices allow beside the other pools as planned, or twice what is planned where there
    is no number of devices. ``degrees``: devices of each instance.
    """
    used: Counter[str] = Counter()
    for pool, count in sizes.items():
        used[devices[pool]] += count * degrees[pool]
    most = {}
    for pool, count in sizes.items():
        there_are = available.get(devices[pool])
        more = count if there_are is None else max(0, there_are - used[devices[pool]]) // degrees[pool]
        most[pool] = count + more
    return most


def parse_bounds(entry: str) -> tuple[str, Bounds]:
    """The pool, as ``MODEL/ROLE`` or ``ROLE``, with ``@TIER`` after it where there are tiers, and its bounds, of ``POOL=LEAST-MOST``.

    A tier may have no instance. Raises ValueError.
    """
    pool, _, sizes = entry.rpartition("=")
    least, _, most = sizes.partition("-")
    if not (pool and _COUNT.fullmatch(least) and _COUNT.fullmatch(most)):
        raise ValueError(f"{entry!r} is not [MODEL/]ROLE[@TIER]=LEAST-MOST, such as E=1-8")
    try:
        _, tier = parse_kind(pool.rpartition("/")[2])
    except ValueError as error:
        raise ValueError(f"{entry!r}: {error}") from None
    if not (0 if tier else 1) <= int(least) <= int(most) <= MAX_POOL_SIZE or not int(most):
        raise ValueError(
            f"{entry!r}: the smallest size is at least 1, of a tier 0, the largest is not below it, and at most {MAX_POOL_SIZE}"
        )
    return pool, Bounds(int(least), int(most))
