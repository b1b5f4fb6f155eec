"""The filter: of all placements those worth a simulation, by their closed form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from itertools import groupby, islice, zip_longest
from math import inf

from .closed_form import Method, Point

MARGIN = 0.7
"""A placement is worth a simulation if its goodput is at least this share of the best, or its price at most the inverse of it."""
_MOST_JUDGED = 400
"""Placements of a method that are judged, at most: those that could have the highest goodput, and the cheapest."""
_OF_METHOD = 3
"""Placements of a method with the highest goodput that are worth a simulation, and as many of the cheapest."""


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
    """At most ``most`` of the points, which come by method: of each method those with the highest goodput, and the cheapest that serve ``rate``.

    The simplest method, the whole model on each instance, always has one if it serves anything.
    """
    fast: dict[Method, list[Scored]] = {}
    cheap: dict[Method, list[Scored]] = {}
    count = 0
    for method, of_method in groupby(points, key=lambda point: point.method):
        first, second = _Kept(), _Kept()
        for point in of_method:
            count += 1
            first.add(point.peak_per_s, count, point)
            if rate is not None and point.peak_per_s > rate:
                second.add(-Scored(point, 0.0).price, count, point)
        fast[method] = _highest(first.best, _OF_METHOD)
        cheap[method] = [] if rate is None else _cheapest(second.best, rate, _OF_METHOD)
    best_rps = max((scored.goodput_rps for found in fast.values() for scored in found), default=0.0)
    least = min((scored.price for found in cheap.values() for scored in found), default=inf)
    worth: list[Sequence[Scored]] = []
    passed_over: list[tuple[Scored, str]] = []
    for method, found in fast.items():
        fastest = [scored for scored in found if scored.goodput_rps >= MARGIN * best_rps and scored.goodput_rps]
        cheapest = [scored for scored in cheap[method] if scored.price <= least / MARGIN]
        if not fastest and not cheapest and len(method.roles) == 1:
            fastest = [scored for scored in found[:1] if scored.goodput_rps]
        if fastest or cheapest:
            worth.append(_in_turns(*((cheapest, fastest) if cheap_first else (fastest, cheapest))))
        elif found:
            passed_over.append((found[0], _reason(found[0], best_rps)))
    return Shortlist(_in_turns(*worth)[:most], passed_over, count)


def _in_turns(*lists: Sequence[Scored]) -> list[Scored]:
    """The first of each, then the second of each, without those that are there twice."""
    unique: dict[tuple[object, ...], Scored] = {}
    for turn in zip_longest(*lists):
        for scored in turn:
            if scored is not None:
                unique.setdefault((scored.point.method, scored.point.pools), scored)
    return list(unique.values())


class _Kept:
    """The points of the highest keys."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Point]] = []

    def add(self, key: float, number: int, point: Point) -> None:
        """Of equal keys those with the lowest numbers are kept."""
        entry = key, -number, point
        if len(self._heap) < _MOST_JUDGED:
            heappush(self._heap, entry)
        elif entry[:2] > self._heap[0][:2]:
            heapreplace(self._heap, entry)

    @property
    def best(self) -> list[Point]:
        return [point for _, _, point in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


def _highest(points: Sequence[Point], wanted: int) -> list[Scored]:
    """Of points by the rate that no queue bears: those with the highest goodput, which is never above it."""
    best: list[Scored] = []
    for point in points:
        if len(best) == wanted and point.peak_per_s <= best[-1].goodput_rps:
            break
        best.append(Scored(point, point.goodput()))
        best.sort(key=_by_goodput)
        del best[wanted:]
    return best


def cheapest(points: Iterable[Point], rate: float) -> Point | None:
    """The cheapest point that meets the objectives at a rate, of those that are likely to; None if none does."""
    kept = _Kept()
    for number, point in enumerate(points):
        if point.peak_per_s > rate:
            kept.add(-Scored(point, 0.0).price, number, point)
    return next((point for point in kept.best if point.meets(rate)), None)


def _cheapest(points: Sequence[Point], rate: float, wanted: int) -> list[Scored]:
    """Of points by price: the first that meet the objectives at this rate."""
    meeting = (Scored(point, point.goodput()) for point in points if point.meets(rate))
    return list(islice(meeting, wanted))


def _by_goodput(scored: Scored) -> tuple[float, float]:
    return -scored.goodput_rps, scored.price


def _reason(scored: Scored, best_rps: float) -> str:
    point = scored.point
    if not scored.goodput_rps:
        return "closed form: misses the objectives even with one request alone"
    binds = point.judge(scored.goodput_rps).binds
    return f"closed form: goodput {scored.goodput_rps:.3g} requests/s, {best_rps:.3g} elsewhere; {binds} is busiest"
