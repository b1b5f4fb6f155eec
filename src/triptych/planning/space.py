"""The placements that there are: methods, devices and tensor-parallel degrees by role, and counts within a budget.

Instances of a role are alike, so only their number counts. Where there are too many numbers, those are taken that some rate asks for: with
fewer instances of any role the rate is not borne, with more of one role alone nothing is gained, but for shorter waits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import product
from math import ceil, inf, prod
from operator import mul

from triptych.domain.stage import Role
from triptych.domain.tier import tier_name
from triptych.runtime.plans import Budget

from .closed_form import Point
from .combination import METHODS, Combination, Counts, Method, Wanted
from .pools import Instance

MOST_INSTANCES = 64
"""Instances of one role, at most."""
MOST_DEGREES = 3
"""Tensor-parallel degrees of a role and device that are tried, from the least that fits on; one less with several kinds of devices."""
DEGREES = (1, 2, 4, 8, 16)
_ALL_COUNTS = 4096
"""Combinations of counts up to which all are taken."""
_SPARE = 2.5
"""Where only a rate bounds a placement, it has instances for at most so many times the rate."""
_REPLACED = 4
"""Instances of a role in place of which others are tried, at most."""
_CENT = 0.005
"""Prices are compared to this."""

Offers = Mapping[Role, Sequence[Instance]]
"""Instances of each role that there can be, of different devices and degrees."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A budget as bounds of counts. ``sized_for``: the rate for which there are instances; None: as many as the budget has."""

    budget: Budget
    sized_for: float | None

    def within(self, combination: Combination, counts: Iterator[Counts]) -> Iterator[Counts]:
        """Those of the counts that the budget has devices and money for."""
        offers = [instance.offer for instance in combination.instances]
        limits: list[tuple[float, list[float]]] = [
            (limit, [offer.degree if offer.device == device else 0 for offer in offers])
            for device, limit in self.budget.devices.items()
            if limit is not None and any(offer.device == device for offer in offers)
        ]
        if self.budget.usd_per_hour is not None:
            limits.append((self.budget.usd_per_hour + _CENT, [offer.usd_per_hour or 0.0 for offer in offers]))
        for chosen in counts:
            if all(sum(map(mul, taken, chosen)) <= limit for limit, taken in limits):
                yield chosen

    def most(self, instance: Instance) -> int:
        """Of these instances, if there were no others."""
        offer, limits = instance.offer, self.budget.devices
        bounds = [float(MOST_INSTANCES)]
        if (devices := limits[offer.device]) is not None:
            bounds.append(devices // offer.degree)
        if self.budget.usd_per_hour is not None:
            if offer.usd_per_hour is None:
                return 0
            bounds.append((self.budget.usd_per_hour + _CENT) // max(offer.usd_per_hour, 1e-9))
        if self.sized_for is not None:
            taken_s = sum(instance.seconds.values())
            prepare_s = instance.prepare_mean_s / offer.kind.prepare_cores
            bounds.append(ceil(_SPARE * self.sized_for * max(taken_s, prepare_s)) + 1)
        return int(min(bounds))


def combinations(offers: Offers, wanted: Wanted, methods: Sequence[Method] = METHODS) -> Iterator[Combination]:
    """The ways to give each role of a method one of its instances, by method."""
    for method in methods:
        for instances in product(*(offers.get(role, ()) for role in method.roles)):
            yield Combination(method, instances, wanted)


def points(offers: Offers, bounds: Bounds, wanted: Wanted, methods: Sequence[Method] = METHODS) -> Iterator[Point]:
    """The placements within the bounds, none twice: by method, and those of a combination one after the other."""
    for combination in combinations(offers, wanted, methods):
        for counts in bounds.within(combination, _counts(combination, bounds)):
            yield Point(combination, counts)


def mixed(best: Iterable[Point], offers: Offers, bounds: Bounds, wanted: Wanted) -> Iterator[Point]:
    """Neighbours of points in which a role has instances of two kinds: some of another kind in place of its own, or beside them.

    By method and combination, as ``points``, and none twice. Points whose method shares stages have none.
    """
    found: dict[Method, dict[tuple[Instance, ...], dict[Counts, None]]] = {}
    for point in best:
        for place, role in enumerate(point.method.roles if point.method.shared is None else ()):
            for other in offers[role]:
                if _tier_of(other) != _tier_of(point.combination.instances[place]):
                    method, instances, counts = _beside(point, place, other, offers[role], bounds.most(other))
                    found.setdefault(method, {}).setdefault(instances, {}).update(dict.fromkeys(counts))
    for method, by_instances in found.items():
        for instances, of_them in by_instances.items():
            combination = Combination(method, instances, wanted)
            for chosen in bounds.within(combination, iter(of_them)):
                yield Point(combination, chosen)


def _tier_of(instance: Instance) -> str:
    return tier_name(instance.offer.device, instance.offer.degree)


def _beside(
    point: Point, place: int, other: Instance, order: Sequence[Instance], most: int
) -> tuple[Method, tuple[Instance, ...], Iterator[Counts]]:
    """Up to ``most`` of another kind at a place, with up to ``_REPLACED`` instances fewer there. The two kinds are in the order given."""
    instances, counts = point.combination.instances, point.counts
    own, count = instances[place], counts[place]
    is_first = order.index(own) < order.index(other)
    kept = range(max(1, count - _REPLACED), count + 1)
    numbers = ((left, more) if is_first else (more, left) for left in kept for more in range(1, most + 1))
    return (
        point.method.mixed(place),
        (*instances[:place], *((own, other) if is_first else (other, own)), *instances[place + 1 :]),
        ((*counts[:place], *two, *counts[place + 1 :]) for two in numbers),
    )


def _counts(combination: Combination, bounds: Bounds) -> Iterator[Counts]:
    most = [bounds.most(instance) for instance in combination.instances]
    if not all(most):
        return iter(())
    if prod(most) <= _ALL_COUNTS:
        return product(*(range(1, count + 1) for count in most))
    return iter(dict.fromkeys(_balanced(combination, most)))


def _balanced(combination: Combination, most: Sequence[int]) -> Iterator[Counts]:
    """The least counts for each rate, and those with one instance more of some roles, which wait less."""
    taken_s = combination.busy_s((1,) * len(most))
    counts = [1] * len(most)
    borne = [(1 / seconds if seconds else inf, at) for at, seconds in enumerate(taken_s)]
    heapify(borne)
    while True:
        for more in product((0, 1), repeat=len(counts)):
            chosen = tuple(count + one for count, one in zip(counts, more, strict=True))
            if all(count <= limit for count, limit in zip(chosen, most, strict=True)):
                yield chosen
        rate, at = borne[0]
        if rate == inf or counts[at] == most[at]:
            return
        counts[at] += 1
        heapreplace(borne, (counts[at] / taken_s[at], at))
