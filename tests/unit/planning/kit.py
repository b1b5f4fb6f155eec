"""Instances and deployments of engines with simple costs, for tests of the planner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.unit.sim.kit import CONTROL_S, FAMILY, IMAGE, MIX, deployment
from triptych.domain.instance import ModelInfo
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role
from triptych.families.base import Family
from triptych.planning import conclusion
from triptych.planning.closed_form import Point
from triptych.planning.combination import Wanted
from triptych.planning.demand import Demand
from triptych.planning.offers import offers
from triptych.planning.planner import Findings, Question
from triptych.planning.pools import Limits, Offer
from triptych.planning.search import Round
from triptych.planning.space import Bounds, Offers, points
from triptych.policy.roofline import DoesNotFit
from triptych.runtime.plans import Budget, Made, Placement, PlanRecord
from triptych.sim.scenario import Deployment
from triptych.testing.fakes import FAKE_MODEL
from triptych.workload.report import Objectives
from triptych.workload.requests import Mix
from triptych.workload.workload import Workload

LIMITS = Limits(8, 32, 2048)
MODEL = replace(FAKE_MODEL, context_length=FAMILY.context_length)
OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=0.06)
ROUNDS = (
    Round(40, 2, 1, 0.25, "queues", keeps=3, most_requests=300),
    Round(40, 2, 1, 0.2, "machines", keeps=0, begin=0.9, tries_headroom=True, most_requests=300),
)
"""Short ones. The first alone is enough for what is known before the last placements are looked at closely."""


@dataclass(frozen=True)
class Factory:
    """``planning.planner.Factory``: all devices are alike but for their prices. ``too_small`` hold encoders only."""

    prices: Mapping[str, float]
    too_small: Sequence[str] = ()
    limits: Limits | None = LIMITS
    given: Sequence[str] = ()
    prepare_cores: int = 4
    bytes_per_pixel: float = 0.3
    roles: Sequence[Role] = tuple(Role)

    @property
    def family(self) -> Family:
        return FAMILY

    @property
    def info(self) -> ModelInfo:
        return MODEL

    def offer(self, role: Role, device: str, degree: int) -> Offer:
        if degree > 1 or (device in self.too_small and role is not Role.E):
            raise DoesNotFit(f"{device} is too small")
        kind = replace(deployment({role: 1}).kinds[Kind(role)], device=device)
        return Offer(role, kind, None if role is Role.E else 100_000, self.prices[device], self.limits)

    def deployment(self, placement: Placement) -> Deployment:
        router: dict[str, Any] = {}
        if "sharding" in placement.settings or "ordering" in placement.settings:
            router["policies"] = {name: value for name, value in placement.settings.items() if name != "tpot-slo-s"}
        pools = placement.pools
        sizes = {kind: pool.count for kind, pool in pools.items()}
        made = deployment(sizes, router=router, text={"engine": {"kv_cache_bytes": 1 << 34}})
        return replace(
            made, kinds={kind: replace(made.kinds[kind], device=pool.device) for kind, pool in pools.items()}
        )


def workload(mix: Mix = MIX, rate: float | None = None, seed: int = 0) -> Workload:
    return Workload(mix, None, IMAGE, () if rate is None else (rate,), 0.0, 60.0, 1.0, seed)


def demand(mix: Mix = MIX, requests: int = 300) -> Demand:
    drawn = replace(workload(mix), duration_s=float(requests)).plan(1.0)
    return Demand.of(drawn.requests, FAMILY, MODEL, 1.0)


def wanted(objectives: Objectives = OBJECTIVES, mix: Mix = MIX) -> Wanted:
    return Wanted(demand(mix), objectives, 0.9, CONTROL_S)


def there_are(what: Wanted, budget: Budget, factory: Factory) -> Offers:
    return offers(factory, budget, what)


def all_points(what: Wanted, budget: Budget, factory: Factory | None = None) -> list[Point]:
    factory = factory or Factory(dict.fromkeys(budget.devices, 1.0))
    return list(points(there_are(what, budget, factory), Bounds(budget, None), what))


def question(devices: Mapping[str, int | None], rate: float | None, **others: Any) -> Question:
    asked: dict[str, Any] = {
        "workload": workload(),
        "objectives": OBJECTIVES,
        "attainment": 0.9,
        "devices": devices,
        "usd_per_hour": None,
        "rate": rate,
        "prefers": "goodput" if rate is None else "cheapest",
        "timeout_s": 60.0,
        "control_s": CONTROL_S,
        "contenders": 8,
        "rounds": ROUNDS,
    }
    return Question(**(asked | others))


def conclude(findings: Findings) -> PlanRecord:
    made = Made("0.1.0", "2026-11-29T00:00:00+00:00", 1.0, 1, 1, (0,), findings.interrupted, (), None, "")
    return conclusion.conclude(findings, model="config.json", model_id="model", common={}, workload={}, made=made)
