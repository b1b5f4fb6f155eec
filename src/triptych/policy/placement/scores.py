"""What is compared to choose among instances. A score gives a value for each of the places: the least is the best.

Where a score sees no difference it may give no values at all.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

from triptych.policy.backlog import ends_s
from triptych.policy.placement.pool import Pool
from triptych.policy.placement.wants import Placeable

Values = Sequence[float]


class Score(Protocol):
    """Values for these places of a pool, in their order."""

    def __call__(self, pool: Pool, want: Placeable, places: Sequence[int], /) -> Values: ...


def load(pool: Pool, want: Placeable, places: Sequence[int]) -> Values:
    """Reads pending tokens, then pending items or requests."""
    del want
    return _column(pool.loads, places)


def pending(pool: Pool, want: Placeable, places: Sequence[int]) -> Values:
    """Reads pending items or requests, whatever their size."""
    del want
    return _column(pool.pending, places)


def predicted_end(pool: Pool, want: Placeable, places: Sequence[int]) -> Values:
    """Reads backlogs: the predicted end of the work, in seconds. Where that of one place is not known, their load."""
    ends = ends_s(_column(pool.backlogs, places), pool.prices(want))
    return load(pool, want, places) if ends is None else ends


def distance(pool: Pool, want: Placeable, places: Sequence[int]) -> Values:
    """Reads who holds the request's embeddings: 0 for those that do themselves, else for those on the host with most bytes of them."""
    holders = want.holders
    if not holders:
        return ()
    ids, hosts = _column(pool.ids, places), pool.hosts
    if any(instance_id in holders for instance_id in ids):
        return [instance_id not in holders for instance_id in ids]
    nbytes: Counter[str] = Counter()
    for holder, held in holders.items():
        if host := hosts.get(holder):
            nbytes[host] += held
    if not nbytes:
        return ()
    most = max(nbytes.values())
    return [nbytes[hosts.get(instance_id, "")] != most for instance_id in ids]


T = TypeVar("T")


def _column(column: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    """The values of these places: mostly all."""
    return column if len(places) == len(column) else [column[place] for place in places]
