"""The filter: of all placements those worth a simulation, by their closed form."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nlargest
from itertools import groupby, zip_longest
from math import inf

from .closed_form import Point, is_hopeless

MARGIN = 0.7
"""A placement is worth a simulation if its goodput is at least this share of the best, or its price at most the inverse of it."""
_MOST_JUDGED = 400
"""Placements of a method that are judged, at most, of those that could have the highest goodput."""
_MOST_KEPT = 100
"""Placements of a combination that could have the highest goodput, at most."""
_OF_METHOD = 3
"""Placements of a method with the highest goodput that are worth a simulation."""
_SERVED = (1.0, 0.7, 1.25)
"""Of the rate: the cheapest of a method that serve so much are worth one as well, as closed forms err in either direction."""
_SPARE = (1.0, 1.08, 1.17, 1.27, 1.4, 1.6, 2.0)
"""Of a rate: of the placements of a combination that no queue keeps from bearing so much the cheapest is judged. With little to spare waits
are long.
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """A placement with what its closed form says."""

    point: Point
    goodput_rps: float

    @property
    def price(self) -> float:
        """Dollars per hour, or devices where one has no price."""
        dollars = self.point.usd_per_hour
        return float(self.point.devices) if dollars is None else dollars


@dataclass(frozen=True, slots=True)
class Shortlist:
    chosen: Sequence[Scored]
    """Worth a simulation."""
    passed_over: Sequence[tuple[Scored, str]]
    """The best of each method that has none among them, with the reason."""
    points: int
    """All that there were."""


def shortlist(points: Iterable[Point], rate: float | None, most: int, *, cheap_first: bool = False) -> Shortlist:
    """At most ``most`` of the points, which come by method: of each method those with the highest goodput, and the cheapest that serve ``rate``,
    or about that.

    The simplest method, the whole model on each instance, always has one if it serves anything.
    """
    found = {method: _sifted(of_method, rate) for method, of_method in groupby(points, key=lambda point: point.method)}
    best_rps = max((scored.goodput_rps for sifted in found.values() for scored in sifted.fast), default=0.0)
    serving = (each for sifted in found.values() for each in sifted.cheap if each.goodput_rps >= (rate or 0.0))
    least = min((scored.price for scored in serving), default=inf)
    worth: list[Sequence[Scored]] = []
    passed_over: list[tuple[Scored, str]] = []
    for method, sifted in found.items():
        fast = [scored for scored in sifted.fast if scored.goodput_rps >= MARGIN * best_rps and scored.goodput_rps]
        cheap = [scored for scored in sifted.cheap if scored.price <= least / MARGIN]
        if not fast and not cheap and len(method.roles) == 1:
            fast = [scored for scored in sifted.fast[:1] if scored.goodput_rps]
        if fast or cheap:
            worth.append([*cheap, *fast] if cheap_first else _in_turns(fast, cheap))
        elif sifted.fast:
            passed_over.append((sifted.fast[0], _reason(sifted.fast[0], best_rps)))
    return Shortlist(_in_turns(*worth)[:most], passed_over, sum(sifted.points for sifted in found.values()))


@dataclass(frozen=True, slots=True)
class _Sifted:
    """Of the points of a method the best, and the number of all."""

    fast: Sequence[Scored]
    """Those with the highest goodput."""
    cheap: Sequence[Scored]
    """The cheapest that meet the objectives at the rate, or near it."""
    points: int


def _sifted(points: Iterable[Point], rate: float | None) -> _Sifted:
    """``points`` come by combination. Those of hopeless combinations are counted only; the first is there if there is nothing else."""
    kept: list[Sequence[Point]] = []
    likely: list[Point] = []
    hopeless: Point | None = None
    count = 0
    for combination, same in groupby(points, key=lambda point: point.combination):
        own = list(same)
        count += len(own)
        if is_hopeless(combination):
            hopeless = hopeless or own[0]
            continue
        kept.append(nlargest(_MOST_KEPT, own, key=lambda point: point.peak_per_s))
        if rate is not None:
            likely += _likely(own, [share * rate for share in _SERVED])
    if not kept and hopeless is not None:
        return _Sifted([Scored(hopeless, 0.0)], [], count)
    likely.sort(key=_by_price)
    cheap = [] if rate is None else [_first_that_meets(likely, share * rate) for share in _SERVED]
    return _Sifted(
        _highest(kept, _OF_METHOD),
        [Scored(point, point.goodput()) for point in cheap if point is not None],
        count,
    )


def _in_turns(*lists: Sequence[Scored]) -> list[Scored]:
    """The first of each, then the second of each, without those that are there twice."""
    unique: dict[tuple[object, ...], Scored] = {}
    for turn in zip_longest(*lists):
        for scored in turn:
            if scored is not None:
                unique.setdefault((scored.point.combination, scored.point.counts), scored)
    return list(unique.values())


def _highest(kept: Sequence[Sequence[Point]], wanted: int) -> list[Scored]:
    """Those with the highest goodput, of points of several combinations, each sorted by the rate that no queue bears.

    Goodput is never above that rate. What is left of it is about the same for all points of a combination, so they are judged in the order
    of what is then to be expected. What does not meet the objectives at the lowest goodput of the best is not looked at further.
    """
    best: list[Scored] = []
    turns = [(-points[0].peak_per_s, number, 0) for number, points in enumerate(kept) if points]
    heapify(turns)
    for _ in range(_MOST_JUDGED):
        if not turns:
            break
        _, number, at = heappop(turns)
        point = kept[number][at]
        least = best[-1].goodput_rps if len(best) == wanted else 0.0
        if point.peak_per_s <= least:
            continue  # as are all others of its combination
        goodput_rps = least
        if not least or point.meets(least):
            goodput_rps = point.goodput()
            best = sorted([*best, Scored(point, goodput_rps)], key=_by_goodput)[:wanted]
        if at + 1 < len(kept[number]):
            left = goodput_rps / point.peak_per_s
            heappush(turns, (-left * kept[number][at + 1].peak_per_s, number, at + 1))
    return best


def cheapest(points: Iterable[Point], rate: float) -> Point | None:
    """The cheapest point that meets the objectives at a rate, of those that are likely to; None if none does. ``points`` come by combination."""
    likely: list[Point] = []
    for combination, same in groupby(points, key=lambda point: point.combination):
        if not is_hopeless(combination):
            likely += _likely(list(same), [rate])
    return _first_that_meets(sorted(likely, key=_by_price), rate)


def _likely(points: Sequence[Point], rates: Sequence[float]) -> Iterator[Point]:
    """Of points of a combination the cheapest that bear these rates, with more and more to spare."""
    bounds = sorted({spare * rate for rate in rates for spare in _SPARE}, reverse=True)
    for point in sorted(points, key=_by_price):
        if bounds and point.peak_per_s > bounds[-1]:
            yield point
            while bounds and point.peak_per_s > bounds[-1]:
                bounds.pop()


def _first_that_meets(points: Iterable[Point], rate: float) -> Point | None:
    return next((point for point in points if point.peak_per_s > rate and point.meets(rate)), None)


def _by_price(point: Point) -> tuple[float, float]:
    """Of equal ones first those that bear more."""
    return Scored(point, 0.0).price, -point.peak_per_s


def _by_goodput(scored: Scored) -> tuple[float, float]:
    return -scored.goodput_rps, scored.price


def _reason(scored: Scored, best_rps: float) -> str:
    point = scored.point
    if not scored.goodput_rps:
        return "closed form: misses the objectives even with one request alone"
    binds = point.judge(scored.goodput_rps).binds
    return f"closed form: goodput {scored.goodput_rps:.3g} requests/s, {best_rps:.3g} elsewhere; {binds} is busiest"
