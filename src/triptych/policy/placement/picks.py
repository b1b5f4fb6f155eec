"""How one of the places is chosen by the scores: compared one after the other, each among those that are equal in the ones before."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from triptych.domain.rng import Rng
from triptych.policy.placement.pool import Pool
from triptych.policy.placement.preferred import preferred, preferred_two
from triptych.policy.placement.scores import Score, Values
from triptych.policy.placement.wants import Placeable

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
    return places[_next(pool, len(places), _best(pool, want, places, scores))]


def spread(pool: Pool, want: Placeable, places: Sequence[int], scores: Sequence[Score], rng: Rng) -> int:
    """The best; of equal ones that which an item's content prefers, or each in turn. Where other routers send much to the pool, the
    better of two of the better half: of the two that the content prefers, or of two random ones.
    """
    if pool.shared:
        return _better_of_two(pool, want, places, scores, None if want.content is not None else rng)
    best = _best(pool, want, places, scores)
    if len(best) == 1:
        return places[best[0]]
    if want.content is None:
        return places[_next(pool, len(places), best)]
    return places[best[preferred([pool.hashes[places[at]] for at in best], want.content)]]


def of_two(pool: Pool, want: Placeable, places: Sequence[int], scores: Sequence[Score], rng: Rng) -> int:
    """The better of two random ones of the better half (power of two choices)."""
    return _better_of_two(pool, want, places, scores, rng)


def _better_of_two(pool: Pool, want: Placeable, places: Sequence[int], scores: Sequence[Score], rng: Rng | None) -> int:
    """Two random ones; without ``rng``, the two that the content prefers."""
    values = scores[0](pool, want, places) if scores else ()
    half = better_half(values) if values else range(len(places))
    if rng is None and want.content is not None:
        two = [half[at] for at in preferred_two([pool.hashes[places[at]] for at in half], want.content)]
    else:
        two = two_of(half, rng)
    return places[_best_among(pool, want, places, scores, two, values)[0]]


def _best(pool: Pool, want: Placeable, places: Sequence[int], scores: Sequence[Score]) -> Sequence[int]:
    """Which of the places are equal in all scores and the best: their positions in ``places``."""
    everyone = range(len(places))
    if not scores or not (values := scores[0](pool, want, places)):
        return _best_among(pool, want, places, scores[1:], everyone)
    best = min(values)
    equal = values.count(best)
    if equal == 1:  # mostly
        return (values.index(best),)
    among = everyone if equal == len(values) else [at for at in everyone if values[at] == best]
    return _best_among(pool, want, places, scores[1:], among)


def _best_among(
    pool: Pool,
    want: Placeable,
    places: Sequence[int],
    scores: Sequence[Score],
    among: Sequence[int],
    first: Values = (),
) -> Sequence[int]:
    """Which of these positions in ``places`` are the best, in their order. ``first`` are the values of the first score, if known."""
    for score in scores:
        values, first = first or score(pool, want, places), ()
        if values:
            best = min([values[at] for at in among])
            among = [at for at in among if values[at] == best]
    return among


def _next(pool: Pool, places: int, best: Sequence[int]) -> int:
    """The first of these positions from that on whose turn it is."""
    at = bisect_left(best, pool.turn % places)
    return best[at] if at < len(best) else best[0]


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
