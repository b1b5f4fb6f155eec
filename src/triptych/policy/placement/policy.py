"""A policy of placement: a row of filters, scores and a pick. docs/adding_a_policy.md shows how to add one."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol, TypeVar

from triptych.domain.record import record
from triptych.domain.rng import Rng
from triptych.policy.backlog import ends_s
from triptych.policy.placement.filters import Filter
from triptych.policy.placement.pool import Pool
from triptych.policy.placement.preferred import preferred, preferred_two
from triptych.policy.placement.wants import Placeable

# --- scores ----------------------------------------------------------------------------------------------------------

Values = Sequence[float]


class Score(Protocol):
    """Values for these places of a pool, in their order."""

    def __call__(self, pool: Pool, want: Placeable, places: Sequence[int], /) -> Values: ...


def load(pool: Pool, want: Placeable, places: Sequence[int]) -> Values:
    """Reads pending tokens, then pending items or requests."""
    del want
    return pool.loads if isinstance(places, range) else [pool.loads[place] for place in places]


def pending(pool: Pool, want: Placeable, places: Sequence[int]) -> Values:
    """Reads pending items or requests, whatever their size."""
    del want
    return _column(pool.pending, places)


def predicted_end(pool: Pool, want: Placeable, places: Sequence[int]) -> Values:
    """Reads backlogs: the predicted end of the work, in seconds. Where that of one place is not known, their load."""
    ends = ends_s(_column(pool.backlog, places), pool.prices(want))
    return load(pool, want, places) if ends is None else ends


def distance(pool: Pool, want: Placeable, places: Sequence[int]) -> Values:
    """Reads who holds the request's embeddings: 0 for those that do themselves, else for those on the host with most bytes of them."""
    if not want.holders:
        return ()
    hosts = pool.hosts
    nbytes: dict[str, int] = {}
    for holder, held in want.holders.items():
        if holder in pool.by_id and pool.by_id[holder] in places:
            return [instance_id not in want.holders for instance_id in _column(pool.instance_id, places)]
        if host := hosts.get(holder):
            nbytes[host] = nbytes.get(host, 0) + held
    if not nbytes:
        return ()
    most = max(nbytes.values())
    return [nbytes.get(hosts.get(instance_id, "")) != most for instance_id in _column(pool.instance_id, places)]


T = TypeVar("T")


def _column(column: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    """The values of these places: mostly all, which are a range."""
    return column if isinstance(places, range) else [column[place] for place in places]


# --- picks -----------------------------------------------------------------------------------------------------------

_LEAST_CHOICE = 3
"""Of two instances the less loaded would always be the same one, for all routers."""


class Pick(Protocol):
    """Chooses one of these places of a pool, of which there is at least one."""

    def __call__(
        self, pool: Pool, want: Placeable, places: Sequence[int], scores: Sequence[Score], rng: Rng, /
    ) -> int: ...


def in_turn(pool: Pool, want: Placeable, places: Sequence[int], scores: Sequence[Score], rng: Rng) -> int:
    """The best; of equal ones each in turn."""
    del rng
    best = _best(pool, want, places, scores)
    at = bisect_left(best, pool.turn % len(places))
    return places[best[at] if at < len(best) else best[0]]


def spread(pool: Pool, want: Placeable, places: Sequence[int], scores: Sequence[Score], rng: Rng) -> int:
    """The best; of equal ones that which an item's content prefers, or each in turn. Where other routers send much to the pool, the
    better of two of the better half: of the two that the content prefers, or of two random ones.
    """
    content = want.content
    if pool.shared:
        half = _better_half(pool, want, places, scores)
        two = two_of(half, rng) if content is None else preferred_two(half, pool.hashes, content)
        return two[_best(pool, want, two, scores)[0]]
    if content is None:
        return in_turn(pool, want, places, scores, rng)
    best = _best(pool, want, places, scores)
    if len(best) == 1:
        return places[best[0]]
    return preferred(best if isinstance(places, range) else [places[at] for at in best], pool.hashes, content)


def of_two(pool: Pool, want: Placeable, places: Sequence[int], scores: Sequence[Score], rng: Rng) -> int:
    """The better of two random ones of the better half (power of two choices)."""
    two = two_of(_better_half(pool, want, places, scores), rng)
    return two[_best(pool, want, two, scores)[0]]


def _best(pool: Pool, want: Placeable, places: Sequence[int], scores: Sequence[Score]) -> Sequence[int]:
    """The positions in ``places`` of those that are the best by all scores, in their order."""
    best: Sequence[int] = range(len(places))
    for score in scores:
        values = score(pool, want, places)
        if not values:
            continue
        if len(best) == len(values):
            least = min(values)
            equal = values.count(least)
            if equal == 1:  # mostly
                return (values.index(least),)
            best = best if equal == len(values) else [at for at in best if values[at] == least]
        else:
            least = min([values[at] for at in best])
            best = [at for at in best if values[at] == least]
    return best


def _better_half(pool: Pool, want: Placeable, places: Sequence[int], scores: Sequence[Score]) -> Sequence[int]:
    """The places that are better by the first score."""
    values = scores[0](pool, want, places) if scores else ()
    half = better_half(values) if values else range(len(places))
    return half if isinstance(places, range) else [places[at] for at in half]


def better_half(values: Sequence[float]) -> list[int]:
    """The positions of the better half of these values, but of no fewer than three, and of all that are equal to one of these."""
    if len(values) <= _LEAST_CHOICE:
        return list(range(len(values)))
    worst = sorted(values)[max(_LEAST_CHOICE, (len(values) + 1) // 2) - 1]
    return [at for at, value in enumerate(values) if value <= worst]


def two_of(positions: Sequence[int], rng: Rng) -> list[int]:
    """Two random ones, in random order, or all if they are fewer."""
    if len(positions) < 2:
        return list(positions)
    first = int(rng.random() * len(positions))
    second = int(rng.random() * (len(positions) - 1))
    return [positions[first], positions[second + (second >= first)]]


# --- policies --------------------------------------------------------------------------------------------------------


@record
class PlacementPolicy:
    """How one of the instances that can take an item or a request is chosen, and to which of them it is given."""

    scores: tuple[Score, ...] = ()
    """Compared in this order."""
    pick: Pick = in_turn
    filters: tuple[Filter[Placeable], ...] = ()
    """Beside those that hold for every policy (``filters.ITEM_FILTERS``, ``PROMPT_FILTERS``, ``ANSWER_FILTERS``)."""
    predicts: bool = False
    """Whether it reads backlogs, which are kept only then. What holding an embedding is worth is then weighed in seconds, not in tokens."""


LEAST_LOADED = PlacementPolicy((load, distance), spread)
PLACEMENTS: dict[str, PlacementPolicy] = {
    "least-loaded": LEAST_LOADED,
    "least-requests": PlacementPolicy((pending,)),
    "power-of-two": PlacementPolicy((load, distance), of_two),
    "predicted": PlacementPolicy((predicted_end, distance), spread, predicts=True),
    "round-robin": PlacementPolicy(),
}
