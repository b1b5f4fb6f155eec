"""Bounds of the sizes of pools, as people write them."""

import re
from collections.abc import Sequence

from triptych.domain.decision import Bounds
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role

MAX_POOL_SIZE = 4096
_COUNT = re.compile("[0-9]{1,9}")


def bounds_of(pool: PoolName, entries: Sequence[str]) -> Bounds | None:
    """Bounds of the pool's own entry, else of its role's; None without either. Raises ValueError."""
    bounds = dict(map(parse_bounds, entries))
    return bounds.get(str(pool)) or bounds.get(pool.role.value)


def parse_bounds(entry: str) -> tuple[str, Bounds]:
    """The pool, as ``MODEL/ROLE`` or ``ROLE``, and its bounds, of ``[MODEL/]ROLE=LEAST-MOST``. Raises ValueError."""
    pool, _, sizes = entry.rpartition("=")
    least, _, most = sizes.partition("-")
    role = pool.rpartition("/")[2]
    if not (pool and _COUNT.fullmatch(least) and _COUNT.fullmatch(most)):
        raise ValueError(f"{entry!r} is not [MODEL/]ROLE=LEAST-MOST, such as E=1-8")
    if role not in {role.value for role in Role}:
        raise ValueError(f"{entry!r} has no such role: it is one of {', '.join(role.value for role in Role)}")
    if not 1 <= int(least) <= int(most) <= MAX_POOL_SIZE:
        raise ValueError(
            f"{entry!r}: the smallest size is at least 1, the largest is not below it, and at most {MAX_POOL_SIZE}"
        )
    return pool, Bounds(int(least), int(most))
