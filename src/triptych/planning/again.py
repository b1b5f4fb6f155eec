"""A plan made again for the mix that is seen: whether another placement, which the cluster can become, is better by enough.

The closed form chooses a few placements, and queues simulate them and the present one, all under the same requests. Settings and kinds of
devices stay as they are: those of an instance, and with several kinds (tiers) of all. It takes seconds on one core.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil

from triptych.domain.replanning import PlanQuestion, Proposal, by_kind, in_letters, role_counts
from triptych.domain.scaling import Kind
from triptych.domain.stage import INSTANCE_NAMES, Role
from triptych.policy.roofline import DoesNotFit
from triptych.runtime.plans import Budget, PlacedPool, Placement, PlanRecord
from triptych.sim.runs import Job, counted
from triptych.workload.report import Objectives
from triptych.workload.requests import Plan, synthetic

from .closed_form import Point
from .combination import Wanted
from .demand import SAMPLE, Demand
from .observed import ObservedMix
from .offers import offers
from .planner import WARM_UP, Factory, placement_of
from .pools import Offer
from .shortlist import Shortlist, shortlist
from .space import Bounds, mixed, points

_MOST = 8
"""Placements that are simulated beside the present one."""
_SEEDS = (0, 1)
_LEAST_REQUESTS, _MOST_REQUESTS = 200, 1200
_OBJECTIVES = 8.0
"""A run lasts so many times the objective of the first token."""
_HEADROOM = 1.1
"""A placement is wanted if it serves this multiple of the rate; the present one is too small if it does not serve the inverse of it."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a plan says beside its placements: as the command line that made it has them."""

    burstiness: float
    control_s: float
    timeout_s: float


class Search:
    """A search for one question. Raises WorkloadError for a mix that the model cannot serve, and DoesNotFit."""

    def __init__(self, plan: PlanRecord, question: PlanQuestion, factory: Factory, conditions: Conditions) -> None:
        """``plan``: that of which the first candidate was deployed. ``factory`` has its settings."""
        self._question = question
        self._factory = factory
        self._conditions = conditions
        self._objectives: Objectives = plan.objectives
        self._attainment = plan.attainment
        self._deployed = plan.candidates[0].placement.queued
        self._tiers = self._deployed.hardware
        self._prices = self._priced()
        self._budget = self._bounded(plan)
        self._observed = ObservedMix.of(question.mix, factory.family, factory.info)
        self._plans: dict[tuple[float, int], Plan] = {}
        self._shares: dict[tuple[str, float], float] = {}

    def run(self) -> Proposal:
        question = self._question
        present = self._placement(by_kind(question.present))
        cost = self._cost(present)
        short = self._share(present, question.rate / _HEADROOM) < self._attainment
        cheaper = [
            placement
            for placement in self._candidates()
            if placement.pools != present.pools and (short or self._cost(placement) <= (1 - question.gain) * cost)
        ]
        for placement in cheaper:
            if self._share(placement, _HEADROOM * question.rate) >= self._attainment:
                return self._proposed(placement, present, short=short)
        if short and cheaper:
            best = max(cheaper, key=lambda placement: self._share(placement, question.rate))
            if self._share(best, question.rate) >= self._share(present, question.rate) + question.gain:
                return self._proposed(best, present, short=True)
        what = (
            "misses the objectives, and nothing within the budget is better"
            if short
            else "meets the objectives, and nothing is cheaper"
        )
        return Proposal(question.present, 0.0, f"{in_letters(question.present)} {what} by {question.gain:.0%}")

    def _proposed(self, placement: Placement, present: Placement, *, short: bool) -> Proposal:
        question, wanted = self._question, role_counts(self._counts(placement.pools.values()))
        own, of_present = (self._share(each, question.rate) for each in (placement, present))
        figures = f"{own:.0%} of the requests within the objectives at {question.rate:.3g} requests/s, {of_present:.0%} with {in_letters(question.present)}"
        if short:
            return Proposal(wanted, max(0.0, own - of_present), figures)
        saved = 1 - self._cost(placement) / self._cost(present)
        cheaper = "cheaper" if len(self._tiers) > 1 else "fewer instances"
        return Proposal(wanted, saved, f"{saved:.0%} {cheaper}; {figures}")

    # --- tiers --------------------------------------------------------------------------------------------------------

    def _counts(self, pools: Iterable[PlacedPool]) -> Counter[Kind]:
        tiers = {devices: tier for tier, devices in self._tiers.items()}
        return Counter({Kind(pool.role, tiers[pool.device, pool.degree]): pool.count for pool in pools})

    def _placement(self, counts: Counter[Kind]) -> Placement:
        """As the deployed one, with other pools. Raises ValueError for an unknown tier."""
        if unknown := {kind.tier for kind in counts} - self._tiers.keys():
            raise ValueError(f"the plan has no tier {', '.join(map(repr, sorted(unknown)))}")
        order = list(INSTANCE_NAMES)
        kinds = sorted((kind for kind in counts if counts[kind]), key=lambda kind: (order.index(kind.role), kind.tier))
        pools = [PlacedPool(kind.role, counts[kind], *self._tiers[kind.tier]) for kind in kinds]
        return Placement.of(pools, self._deployed.prepare_cores, self._deployed.settings)

    def _priced(self) -> Mapping[str, float]:
        """The price of an instance on each tier; its devices where one tier has no price."""
        prices = {}
        for pool in self._deployed.pools.values():
            [kind] = self._counts([pool])
            prices[kind.tier] = self._factory.offer(pool.role, pool.device, pool.degree).usd_per_hour
        if None in prices.values():
            return {tier: float(degree) for tier, (_, degree) in self._tiers.items()}
        return {tier: price or 0.0 for tier, price in prices.items()}

    def _cost(self, placement: Placement) -> float:
        counts = self._counts(placement.pools.values())
        return sum(count * self._prices[kind.tier] for kind, count in counts.items())

    # --- placements ---------------------------------------------------------------------------------------------------

    def _bounded(self, plan: PlanRecord) -> Budget:
        """As many devices as there can be instances. Tiers on one kind of device share those of the plan."""
        devices: Counter[str] = Counter()
        for tier, (device, degree) in self._tiers.items():
            devices[device] += self._question.most.get(tier, 0) * degree
        kinds = Counter(device for device, _ in self._tiers.values())
        for device, limit in plan.budget.devices.items():
            if limit is not None and kinds[device] > 1:
                devices[device] = min(devices[device], limit)
        return Budget(devices, None, self._question.rate)

    def _candidates(self) -> Sequence[Placement]:
        """The cheapest first. Where nothing starts and stops instances, those with as many on each tier as there are."""
        question = self._question
        rate = _HEADROOM * question.rate
        drawn = synthetic(
            self._observed,
            rate=question.rate,
            duration_s=SAMPLE / question.rate,
            burstiness=self._conditions.burstiness,
            rng=random.Random("sample"),  # noqa: S311 - nobody is to be kept out
        )
        factory = self._factory
        demand = Demand.of(drawn.requests, factory.family, factory.info, self._conditions.burstiness)
        wanted = Wanted(demand, self._objectives, self._attainment, self._conditions.control_s)
        there_are = offers(_Like(factory, self._tiers, question.kinds), self._budget, wanted)
        bounds = Bounds(self._budget, question.rate if question.scales else None)

        def all_points() -> Iterator[Point]:
            return points(there_are, bounds, wanted)

        near: Iterator[Point] = iter(())
        if len(self._tiers) > 1:
            alone = shortlist(all_points(), rate, _MOST, cheap_first=question.scales)
            near = mixed([scored.point for scored in alone.chosen], there_are, bounds, wanted)
        found = filter(self._can_be, chain(all_points(), near))
        chosen: Shortlist = shortlist(found, rate, _MOST, cheap_first=question.scales)
        in_order = sorted(chosen.chosen, key=lambda scored: (scored.price, -scored.goodput_rps))
        return [self._placement(self._counts(placement_of(scored.point).pools.values())) for scored in in_order]

    def _can_be(self, point: Point) -> bool:
        if self._question.scales:
            return True
        there_are, wanted = (Counter[str](), Counter[str]())
        for entry in self._question.present:
            there_are[entry.tier] += entry.count
        for kind, count in self._counts(placement_of(point).pools.values()).items():
            wanted[kind.tier] += count
        return there_are == wanted

    # --- simulation ---------------------------------------------------------------------------------------------------

    def _share(self, placement: Placement, rate: float) -> float:
        """The share of requests within the objectives."""
        key = str(placement), rate
        if key not in self._shares:
            deployment = self._factory.deployment(placement)
            met = requests = 0
            for seed in _SEEDS:
                plan = self._plan(rate, seed)
                outcome = Job(deployment, plan, "queues", seed, rate, self._conditions.timeout_s).run()
                records = counted(outcome, WARM_UP * plan.duration_s).records
                met += sum(map(self._objectives.met, records))
                requests += len(records)
            self._shares[key] = met / requests if requests else 0.0
        return self._shares[key]

    def _plan(self, rate: float, seed: int) -> Plan:
        """The same requests at every rate."""
        if (rate, seed) not in self._plans:
            wanted = ceil(_OBJECTIVES * (self._objectives.ttft_s or 0.0) * rate)
            requests = min(_MOST_REQUESTS, max(_LEAST_REQUESTS, wanted))
            self._plans[rate, seed] = synthetic(
                self._observed,
                rate=rate,
                duration_s=requests / rate,
                burstiness=self._conditions.burstiness,
                rng=random.Random(f"{seed}"),  # noqa: S311
            )
        return self._plans[rate, seed]


class _Like:
    """``planning.offers.Supplier`` of instances like those that are deployed, in roles that they can be given."""

    def __init__(self, factory: Factory, tiers: Mapping[str, tuple[str, int]], kinds: frozenset[Kind]) -> None:
        self._factory = factory
        self._there_are = {(kind.role, *tiers[kind.tier]) for kind in kinds if kind.tier in tiers}
        self.roles: Sequence[Role] = [role for role in factory.roles if any(kind.role is role for kind in kinds)]

    @property
    def bytes_per_pixel(self) -> float:
        return self._factory.bytes_per_pixel

    def offer(self, role: Role, device: str, degree: int) -> Offer:
        """Raises DoesNotFit."""
        if (role, device, degree) not in self._there_are:
            raise DoesNotFit(f"{role.value} is not deployed on {degree}x{device}")
        return self._factory.offer(role, device, degree)
