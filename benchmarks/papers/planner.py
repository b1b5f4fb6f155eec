"""The planner over clusters of the papers: its closed form of some counts, and its search."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from benchmarks.papers.simulation import plan
from triptych.domain.instance import ModelInfo
from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Role
from triptych.engine.delay import kv_memory
from triptych.families.base import Family
from triptych.planning.combination import METHODS, Combination, Wanted
from triptych.planning.demand import SAMPLE, Demand
from triptych.planning.planner import Question, search
from triptych.planning.pools import Instance, Limits, Offer
from triptych.planning.search import Round
from triptych.policy.costs import Costs
from triptych.policy.roofline import DoesNotFit
from triptych.runtime.plans import Placement
from triptych.sim.scenario import Deployment
from triptych.workload.report import Objectives
from triptych.workload.requests import Mix
from triptych.workload.workload import Workload

ATTAINMENT, SEED, TIMEOUT_S = 0.9, 1, 3600.0
ROUNDS = (Round(60, 2, 1, 0.1, "queues", keeps=4), Round(100, 4, 1, 0.04, "machines", keeps=0))
"""Shorter ones than those of ``triptych plan``."""


def offer(made: Deployment, role: Role) -> Offer:
    """The instances of a role, as a deployment has them, without a price."""
    kind = made.kinds[Kind(role)]
    if role is Role.E:
        return Offer(role, kind, None, None, Limits(made.encoder.batches.max_batch_items, 1, 1))
    engine = made.texts[Kind(role)].engine
    kv_tokens, _ = kv_memory(made.model, Costs(kind.profiles[ModelPart.DECODER]), engine)
    limits = Limits(made.encoder.batches.max_batch_items, engine.max_sequences, engine.most_step_tokens)
    return Offer(role, kind, kv_tokens, None, limits)


def wanted_of(made: Deployment, load: Mix, objectives: Objectives) -> Wanted:
    demand = Demand.of(plan(load, 1.0, SAMPLE, SEED).requests, made.family, made.model, 1.0)
    return Wanted(demand, objectives, ATTAINMENT, made.control_s)


def combination(made: Deployment, roles: Sequence[Role], wanted: Wanted) -> Combination:
    """The method with these roles, with the instances of a deployment."""
    method = next(method for method in METHODS if method.roles == tuple(roles) and method.shared is None)
    instances = []
    for role in roles:
        offered = offer(made, role)
        assert offered.limits is not None
        instances.append(Instance(offered, wanted.demand, offered.limits, bytes_per_pixel=made.bytes_per_pixel))
    return Combination(method, instances, wanted)


@dataclass(frozen=True)
class Planned:
    """``planning.planner.Factory`` of clusters that ``make`` makes of a number of instances of each role: ``E:6,P:1,D:1``."""

    make: Callable[[str], Deployment]
    one_of_each: Deployment
    prepare_cores: int = 16
    given: Collection[str] = ("ordering", "sharding", "tpot-slo-s", "kv-bytes-per-step")
    """As the papers have them."""

    @property
    def roles(self) -> Sequence[Role]:
        return [pool.role for pool in self.one_of_each.sizes]

    @property
    def family(self) -> Family:
        return self.one_of_each.family

    @property
    def info(self) -> ModelInfo:
        return self.one_of_each.model

    @property
    def bytes_per_pixel(self) -> float:
        return self.one_of_each.bytes_per_pixel

    def offer(self, role: Role, device: str, degree: int) -> Offer:
        """Raises DoesNotFit."""
        if degree > 1:
            raise DoesNotFit(f"{role.value} on {device}: the paper has one device for an instance")
        return offer(self.one_of_each, role)

    def deployment(self, placement: Placement) -> Deployment:
        return self.make(placement.roles_text)


def chosen(factory: Planned, load: Mix, devices: int, objectives: Objectives, contenders: int) -> Placement | None:
    """What the planner chooses for the highest goodput on so many devices; None if nothing meets the objectives."""
    device = next(iter(factory.one_of_each.kinds.values())).device
    question = Question(
        workload=Workload(load, None, load.size, (), 0.0, 60.0, 1.0, SEED),
        objectives=objectives,
        attainment=ATTAINMENT,
        devices={device: devices},
        usd_per_hour=None,
        rate=None,
        prefers="goodput",
        timeout_s=TIMEOUT_S,
        control_s=factory.one_of_each.control_s,
        contenders=contenders,
        rounds=ROUNDS,
    )
    halving = search(question, factory).halving
    return None if halving is None else halving.finalists[0].placement
