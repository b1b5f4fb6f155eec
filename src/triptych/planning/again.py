"""A plan made again for the mix that is seen: whether another placement, which the cluster can become, is better by enough.

The closed form chooses a few placements, and queues simulate them and the present one, all under the same requests. Settings and kinds of
devices stay as they are. It takes seconds on one core.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from triptych.domain.replanning import PlanQuestion, Proposal, by_role, in_letters, role_counts
from triptych.domain.stage import INSTANCE_NAMES, Role
from triptych.policy.roofline import DoesNotFit
from triptych.runtime.plans import Budget, Placement, PlanRecord
from triptych.sim.runs import Job, counted
from triptych.workload.report import Objectives
from triptych.workload.requests import Plan, synthetic

from .combination import Wanted
from .demand import SAMPLE, Demand
from .observed import ObservedMix
from .offers import offers
from .planner import WARM_UP, Factory
from .pools import Offer
from .shortlist import Shortlist, shortlist
from .space import Bounds, points

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
        self._deployed = plan.candidates[0].placement.plain
        self._budget = self._bounded(plan)
        self._observed = ObservedMix.of(question.mix, factory.family, factory.info)
        self._plans: dict[tuple[float, int], Plan] = {}
        self._shares: dict[tuple[tuple[tuple[Role, int], ...], float], float] = {}

    def run(self) -> Proposal:
        question = self._question
        present = self._placement(by_role(question.present))
        short = self._share(present, question.rate / _HEADROOM) < self._attainment
        cheaper = [
            placement
            for placement in self._candidates()
            if placement.roles != present.roles
            and (short or _instances(placement) <= (1 - question.gain) * _instances(present))
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
        question, wanted = self._question, role_counts(placement.roles)
        own, of_present = (self._share(each, question.rate) for each in (placement, present))
        figures = f"{own:.0%} of the requests within the objectives at {question.rate:.3g} requests/s, {of_present:.0%} with {in_letters(question.present)}"
        if short:
            return Proposal(wanted, max(0.0, own - of_present), figures)
        saved = 1 - _instances(placement) / _instances(present)
        return Proposal(wanted, saved, f"{saved:.0%} fewer instances; {figures}")

    # --- placements ---------------------------------------------------------------------------------------------------

    def _bounded(self, plan: PlanRecord) -> Budget:
        """As many devices as there can be instances, where all are alike."""
        kinds = {(self._deployed.devices[role], self._deployed.degrees[role]) for role in self._deployed.roles}
        if len(kinds) > 1:
            return plan.budget
        [(device, degree)] = kinds
        return Budget({device: self._question.most * degree}, None, self._question.rate)

    def _candidates(self) -> Sequence[Placement]:
        """The cheapest first. Where nothing starts and stops instances, those with as many as there are."""
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
        supplier = _Like(factory, self._deployed, question.roles)
        there_are = offers(supplier, self._budget, wanted)
        bounds = Bounds(self._budget, question.rate if question.scales else None)
        found = (
            point
            for point in points(there_are, bounds, wanted)
            if question.scales or sum(pool.count for pool in point.pools) == question.most
        )
        chosen: Shortlist = shortlist(found, rate, _MOST, cheap_first=question.scales)
        placements = []
        for scored in sorted(chosen.chosen, key=lambda scored: (scored.price, -scored.goodput_rps)):
            counts = {
                role: pool.count for role, pool in zip(scored.point.method.roles, scored.point.pools, strict=True)
            }
            placements.append(self._placement(counts))
        return placements

    def _placement(self, counts: Mapping[Role, int]) -> Placement:
        """As the deployed one, with other roles."""
        deployed = self._deployed
        usual = next(iter(deployed.roles))
        roles = [role for role in INSTANCE_NAMES if counts.get(role)]
        return replace(
            deployed,
            roles={role: counts[role] for role in roles},
            devices={role: deployed.devices.get(role, deployed.devices[usual]) for role in roles},
            degrees={role: deployed.degrees.get(role, deployed.degrees[usual]) for role in roles},
            switch_roles=False,
        )

    # --- simulation ---------------------------------------------------------------------------------------------------

    def _share(self, placement: Placement, rate: float) -> float:
        """The share of requests within the objectives."""
        key = tuple(placement.roles.items()), rate
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

    def __init__(self, factory: Factory, deployed: Placement, roles: frozenset[Role]) -> None:
        self._factory = factory
        self._kinds = {role: (deployed.devices[role], deployed.degrees[role]) for role in deployed.roles}
        self.roles: Sequence[Role] = [role for role in factory.roles if role in roles]

    @property
    def bytes_per_pixel(self) -> float:
        return self._factory.bytes_per_pixel

    def offer(self, role: Role, device: str, degree: int) -> Offer:
        """Raises DoesNotFit."""
        kinds = set(self._kinds.values())
        wanted = self._kinds.get(role) if len(kinds) > 1 else next(iter(kinds))
        if wanted != (device, degree):
            raise DoesNotFit(f"{role.value} is not deployed on {degree}x{device}")
        return self._factory.offer(role, device, degree)


def _instances(placement: Placement) -> int:
    return sum(placement.roles.values())
