"""A plan: the placements that were compared for a workload, what is predicted of each, and why one was chosen. As data, and as JSON."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from triptych.domain.mix import Form
from triptych.domain.scaling import Kind
from triptych.domain.stage import INSTANCE_NAMES, Role, Stage
from triptych.domain.tier import tier_name
from triptych.files import BadFile, read_bytes
from triptych.workload.fidelity import Fidelity
from triptych.workload.prices import Prices
from triptych.workload.report import Latency, Objectives

MAX_NBYTES = 16 << 20
_STRICT = ConfigDict(extra="forbid")
_INDENT = 1

Options = Mapping[str, str]
"""Options of a command by name, without the dashes in front: ``{"max-sequences": "128"}``. A switch has the value ``yes`` or ``no``."""
Win = Literal["cheapest", "goodput", "ttft"]
"""What a candidate can be the best in: the lowest price among those that meet the objectives, the highest goodput within the
budget, or the lowest P90 of the time to the first token among those that meet the objectives.
"""


_OF_MODES = frozenset({"pool-sizes", "lending", "encode-first"})
"""Settings of autoscaling and lending."""
_ROUTING = frozenset({"encoder-routing", "text-routing"})


class BadPlan(ValueError):
    """A file that is no plan. The message says what is wrong, without the file's name."""


def words(options: Options) -> tuple[str, ...]:
    """Options as a command line has them, in their order."""
    return tuple(_word(name, value) for name, value in options.items())


def _word(name: str, value: str) -> str:
    if value in ("yes", "no"):
        return f"--{name}" if value == "yes" else f"--no-{name}"
    return f"--{name}={value}"


@dataclass(frozen=True, slots=True)
class PlacedPool:
    """Equal instances of a role."""

    __pydantic_config__ = _STRICT

    role: Role
    count: int
    device: str
    degree: int

    def __str__(self) -> str:
        return f"{self.role.value}:{self.count} {'' if self.degree == 1 else f'{self.degree}x'}{self.device}"


@dataclass(frozen=True, slots=True)
class Placement:
    """A cluster of one model: instances by role, their devices, and the settings in which candidates differ."""

    __pydantic_config__ = _STRICT

    roles: Mapping[Role, int]
    """Instances by role, in the order of ``INSTANCE_NAMES``; those in ``more`` are not counted."""
    devices: Mapping[Role, str]
    """The kind of device of each role, by its name in the catalogue."""
    degrees: Mapping[Role, int]
    """Devices of each instance: the tensor-parallel degree."""
    prepare_cores: int
    """Cores that preprocess, of each instance that encodes."""
    switch_roles: bool = False
    settings: Options = field(default_factory=dict)
    """Options of services, as of ``triptych up``: batch limits, step budgets, policies."""
    more: tuple[PlacedPool, ...] = ()
    """Further instances of roles that are in ``roles``, on other kinds of devices or in other degrees."""
    autoscale: bool = False
    """Whether pools follow their load."""

    def __post_init__(self) -> None:
        """Raises ValueError for what is no cluster."""
        if not (self.roles.keys() == self.devices.keys() == self.degrees.keys() >= {pool.role for pool in self.more}):
            raise ValueError("roles, devices and degrees are not of the same roles")
        if len(self.pools) < len(self._in_order):
            raise ValueError("a role has two pools on the same devices")
        numbers = [number for pool in self._in_order for number in (pool.count, pool.degree)]
        if min(numbers, default=0) < 1 or self.prepare_cores < 1:
            raise ValueError("a number of instances, devices or cores is below 1")
        if idle := [stage.value for stage in Stage if not any(role.serves(stage) for role in self.roles)]:
            raise ValueError(f"nothing would {' and '.join(idle)}")

    @classmethod
    def of(cls, pools: Sequence[PlacedPool], prepare_cores: int, settings: Options) -> Self:
        """A cluster of these pools. Of a role that has several, the first is that of ``roles``. Raises ValueError."""
        first = {pool.role: pool for pool in reversed(pools)}
        in_order = [first[role] for role in INSTANCE_NAMES if role in first]
        return cls(
            roles={pool.role: pool.count for pool in in_order},
            devices={pool.role: pool.device for pool in in_order},
            degrees={pool.role: pool.degree for pool in in_order},
            prepare_cores=prepare_cores,
            settings=settings,
            more=tuple(pool for pool in pools if pool is not first[pool.role]),
        )

    @property
    def plain(self) -> "Placement":
        """Without switching, scaling and lending, as queues and machines simulate it."""
        settings = {name: value for name, value in self.settings.items() if name not in _OF_MODES}
        return replace(self, switch_roles=False, autoscale=False, settings=settings)

    @property
    def queued(self) -> "Placement":
        """``plain``, and without routing by predicted ends, which queues do not have."""
        plain = self.plain
        predicted = {name for name in _ROUTING if plain.settings.get(name) == "predicted"}
        return replace(plain, settings={name: value for name, value in plain.settings.items() if name not in predicted})

    @property
    def _in_order(self) -> Sequence[PlacedPool]:
        return [
            pool
            for role, count in self.roles.items()
            for pool in (
                PlacedPool(role, count, self.devices[role], self.degrees[role]),
                *(other for other in self.more if other.role is role),
            )
        ]

    @property
    def pools(self) -> Mapping[Kind, PlacedPool]:
        """All pools. Those of a role that has several are tiers of it."""
        mixed = {pool.role for pool in self.more}
        return {
            Kind(pool.role, tier_name(pool.device, pool.degree) if pool.role in mixed else ""): pool
            for pool in self._in_order
        }

    @property
    def hardware(self) -> Mapping[str, tuple[str, int]]:
        """Kinds of devices with the number of an instance, by the name of their tier. Where all instances are alike, it is empty."""
        found = dict.fromkeys((pool.device, pool.degree) for pool in self._in_order)
        return {"" if len(found) == 1 else tier_name(*devices): devices for devices in found}

    @property
    def sizes(self) -> Counter[Role]:
        """Instances by role, of all its pools."""
        sizes: Counter[Role] = Counter()
        for pool in self._in_order:
            sizes[pool.role] += pool.count
        return sizes

    @property
    def roles_text(self) -> str:
        """As ``--roles`` has them: ``E:2,PD:1``, or with tiers ``PD@h100:1,PD@l4:2``."""
        return ",".join(f"{kind}:{pool.count}" for kind, pool in self.pools.items())

    @property
    def devices_text(self) -> str:
        """As ``--device`` has them."""
        return ",".join(f"{kind}={pool.device}" for kind, pool in self.pools.items())

    @property
    def degrees_text(self) -> str:
        """As ``--tensor-parallel`` has them."""
        return ",".join(f"{kind}={pool.degree}" for kind, pool in self.pools.items())

    @property
    def device_counts(self) -> Counter[str]:
        """Devices that it takes, by kind."""
        counts: Counter[str] = Counter()
        for pool in self._in_order:
            counts[pool.device] += pool.count * pool.degree
        return counts

    @property
    def cluster_options(self) -> tuple[str, ...]:
        """Options that ``triptych up`` and ``triptych simulate`` have in common."""
        switching = "yes" if self.switch_roles else "no"
        scaling = {"autoscale": "yes"} if self.autoscale else {}
        return words({"roles": self.roles_text, "switch-roles": switching, **scaling, **self.settings})

    @property
    def hardware_options(self) -> tuple[str, ...]:
        """Options that ``triptych simulate`` has beside them."""
        return words(
            {
                "device": self.devices_text,
                "tensor-parallel": self.degrees_text,
                "prepare-cores": str(self.prepare_cores),
            }
        )

    def __str__(self) -> str:
        """In a few words: ``E:2 l4, PD:1 2xh100``."""
        return ", ".join(map(str, self._in_order))


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may take. Without any limit it takes what the rate needs."""

    __pydantic_config__ = _STRICT

    devices: Mapping[str, int | None]
    """The kinds of devices to choose from, with how many there are; None: as many as are wanted."""
    usd_per_hour: float | None
    rate: float
    """Requests per second that are to be served."""


@dataclass(frozen=True, slots=True)
class KindFigures:
    """Predicted figures of the requests of one kind, or of all."""

    __pydantic_config__ = _STRICT

    requests: int
    answered: int
    ttft: Latency
    tpot: Latency
    attainment: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Predicted figures of a placement at one rate, of the runs of all seeds together."""

    __pydantic_config__ = _STRICT

    rate: float
    all: KindFigures
    by_kind: Mapping[str, KindFigures]
    """By ``text``, ``image``, ``video`` and ``audio``, of those that the workload has."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest rate at which the objectives are met. The range is from the worst seed to the best."""

    __pydantic_config__ = _STRICT

    rps: float
    least_rps: float
    most_rps: float
    is_bound: bool = False
    """Whether it is at least ``rps``: no higher rate was tried."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What is predicted of a placement under the workload."""

    __pydantic_config__ = _STRICT

    figures: Figures
    """At the plan's rate."""
    goodput: Goodput | None
    """None without objectives, or if it was not looked for."""
    headroom: Mapping[str, float]
    """Attainment at shares of the plan's rate: ``-20 %``, ``+20 %``. Empty where it was not simulated."""
    utilization: Mapping[str, float]
    """What each stage takes at the plan's rate of the time of the instances that serve it, in full batches: ``encode``, ``prefill`` and
    ``decode``; ``prepare`` of their cores, ``transfer`` of their links. By the closed form.
    """
    binds: str
    """Which of them bounds the rate: the one that takes most of the busiest instances."""
    prices: Prices | None
    """At the plan's rate; None where a device has no price."""
    fidelity: Fidelity
    seeds: int
    """Runs of the figures: each with another seed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that was simulated."""

    __pydantic_config__ = _STRICT

    placement: Placement
    predicted: Predicted
    meets: bool
    """Whether the objectives are met at the plan's rate, within the budget."""
    lacks: str = ""
    """In one line, what it lacks in comparison with the chosen one; empty for that."""
    note: str = ""
    """In which settings it differs from another candidate with the same instances."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A placement that was given up before the last round."""

    __pydantic_config__ = _STRICT

    placement: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class ShadowPrice:
    """What one more device of a kind would bring."""

    __pydantic_config__ = _STRICT

    device: str
    role: Role
    """The role that it is best used for."""
    goodput_rps: float
    """Requests per second that the goodput gains, by the closed form."""
    usd_per_hour: float | None


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why nothing meets the objectives, and what would be nearest."""

    __pydantic_config__ = _STRICT

    reasons: tuple[str, ...]
    """Objectives that are missed, each with the stage and the best figure that there is."""
    relaxed: Objectives | None
    """Objectives that the best candidate within the budget meets."""
    larger: Placement | None
    """The cheapest placement that meets the objectives with more devices or money, by the closed form."""
    larger_usd_per_hour: float | None


@dataclass(frozen=True, slots=True)
class Made:
    """How a plan came about."""

    __pydantic_config__ = _STRICT

    version: str
    """Of Triptych."""
    at: str
    """ISO 8601, UTC."""
    took_s: float
    points: int
    """Placements that the closed form judged."""
    simulated: int
    """Placements that were simulated."""
    seeds: tuple[int, ...]
    interrupted: bool
    sources: tuple[str, ...]
    """Where the costs come from."""
    expected_error: float | None
    """Relative error to be expected of predicted times; None if it is not known."""
    error_source: str


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan. Candidates come in their order, the chosen one first."""

    __pydantic_config__ = _STRICT

    model: str
    """As ``--model`` has it."""
    model_id: str
    common: Options
    """Options of ``triptych simulate`` that all placements share: dtype, profiles, hosts, settings that were given."""
    workload: Options
    """Options of ``triptych bench`` and ``triptych simulate`` that offer the load, with ``rate`` and ``seed``."""
    objectives: Objectives
    attainment: float
    """Share of requests that must meet the objectives."""
    budget: Budget
    candidates: tuple[Candidate, ...]
    winners: Mapping[Win, int]
    """Numbers of candidates, from 0 on."""
    front: tuple[int, ...]
    """Numbers of the candidates of which no other one is as good in price, goodput and time to the first token, and better in one."""
    why: tuple[str, ...]
    rejected: tuple[Rejected, ...]
    shadow_prices: tuple[ShadowPrice, ...]
    infeasible: Infeasible | None
    made: Made
    mix: tuple[Form, ...] | None = None
    """The requests that it is for, as routers count them; None in plans of earlier versions."""
    format: Literal["triptych-plan"] = "triptych-plan"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        """Raises ValueError for numbers of candidates that are not there."""
        numbers = range(len(self.candidates))
        if not all(number in numbers for number in (*self.winners.values(), *self.front)):
            raise ValueError("winners or front name a candidate that is not there")

    @property
    def chosen(self) -> Candidate | None:
        """The candidate to deploy; None if none meets the objectives."""
        return self.candidates[0] if self.candidates and self.candidates[0].meets else None

    def simulate_line(self, placement: Placement) -> str:
        """A command that simulates a placement of the plan under its workload."""
        load = words(self.workload)
        options = (*placement.cluster_options, *placement.hardware_options, *words(self.common), *load)
        return shlex.join(("triptych", "simulate", f"--model={self.model}", *options))

    def dump(self) -> str:
        """As JSON text."""
        return _adapter().dump_json(self, indent=_INDENT).decode() + "\n"

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Read a plan strictly: everything must be there, and nothing else. Raises BadPlan."""
        try:
            plan = _adapter().validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            reason = first["msg"].removeprefix("Value error, ")
            raise BadPlan(f"{where}: {reason}" if where else reason) from None
        assert isinstance(plan, cls)  # noqa: S101 - that of the adapter
        return plan


@cache
def _adapter() -> "TypeAdapter[PlanRecord]":
    return TypeAdapter(PlanRecord)


def write(path: Path, plan: PlanRecord) -> None:
    """Raises OSError."""
    path.write_text(plan.dump())


def read(path: Path) -> PlanRecord:
    """The plan in a file. Raises BadPlan, also for what cannot be read."""
    try:
        return PlanRecord.parse(read_bytes(path, MAX_NBYTES))
    except BadFile as error:
        raise BadPlan(str(error)) from None
