"""Reports of members to a pool manager, its orders, and what it tells watchers. Durations only, no clock times."""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Self

from triptych.domain.decision import ScalingStatus
from triptych.domain.instance import InstanceInfo, InstanceLimits, InstanceLoad, ServedPart
from triptych.domain.membership import Member, MemberKind
from triptych.domain.replanning import PlanStatus
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role, Stage
from triptych.domain.tier import Tier
from triptych.domain.windows import WindowReport

MAX_OVERRIDE_S = 30 * 86_400.0
"""Longest time of a manual size."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A process introduces itself as a member. A restarted process has another ``epoch``."""

    kind: MemberKind
    instance_id: str
    epoch: int
    address: str
    """``HOST:PORT`` at which others reach it."""
    model: str
    """The served model's name."""
    revision: str = ""
    """Revision as in ``ModelInfo``; empty for a router."""
    role: Role | None = None
    """Role at its start; None for a router."""
    arena_bytes: int = 0
    max_items: int = 0
    """Capacities as in ``InstanceInfo``."""
    kv_tokens: int = 0
    transports: tuple[str, ...] = ()
    """Backends by which its arena can be read."""
    parts: tuple[ServedPart, ...] = ()
    """Parts of the model that an instance runs, with the limits of their batches."""
    slo: tuple[str, ...] = ()
    """Objectives of a router, as ``Slo.parse`` reads them."""
    switchable: Role | None = None
    """The widest role that an instance can be ordered to switch to."""
    tier: Tier | None = None
    """Tier of hardware of an instance: it is in a pool with others of that tier. None without tiers."""
    metrics: str = ""
    """``HOST:PORT`` of its admin port; empty without one."""

    @property
    def service(self) -> str:
        """The service that it is a process of, as jobs of Prometheus are named."""
        if self.kind is MemberKind.ROUTER:
            return "router"
        return "encoder" if self.role is Role.E and self.switchable is None else "text"

    @property
    def pool(self) -> PoolName | None:
        """The pool of an instance; None for a router."""
        if self.role is None:
            return None
        return PoolName(self.model, self.role, "" if self.tier is None else self.tier.name)

    @classmethod
    def of_instance(cls, info: InstanceInfo, *, address: str, tier: Tier | None = None) -> Self:
        return cls(
            MemberKind.INSTANCE,
            info.instance_id,
            info.epoch,
            address,
            info.model.model_id,
            info.model.revision,
            info.role,
            info.arena_bytes,
            info.max_items,
            info.kv_tokens,
            tuple(offer.backend for offer in info.offers),
            info.parts,
            switchable=info.switchable,
            tier=tier,
        )


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member's regular report. A leaving member's load says ``draining``."""

    sequence: int
    """Rises with each heartbeat of a stream."""
    load: InstanceLoad
    drained: bool = False
    """Whether the member has drained: no work is left on it."""


@dataclass(frozen=True, slots=True)
class Farewell:
    """The last report of a process that ends in order."""

    reason: str = ""


MemberReport = Registration | Heartbeat | Farewell | WindowReport


class OrderKind(Enum):
    """Kind of an order of the manager to a member."""

    REGISTERED = "registered"
    """No order: the manager accepted the registration."""
    REREGISTER = "reregister"
    """Register again: the manager does not know the member (any more)."""
    DRAIN = "drain"
    """Accept nothing new and finish what runs."""
    SWITCH = "switch"
    """Serve the stages of another role."""
    LIMITS = "limits"
    """Change the limits of batches."""


@dataclass(frozen=True, slots=True)
class Order:
    kind: OrderKind
    reason: str = ""
    role: Role | None = None
    """Role to switch to."""
    version: int = 0
    """Version of a switch: above that of the last one (``InstanceLoad.stages_version``). Likewise of limits (``LimitsReport.version``)."""
    limits: InstanceLimits | None = None
    """Limits that differ from those at the member's start, for an order of limits."""
    by_hand: bool = False
    """Whether a person gave an order of limits."""


class Departure(Enum):
    """Why a member is no longer listed."""

    LEFT = "left"
    """The member said that it leaves, or another process has replaced it."""
    LOST = "lost"
    """The manager has heard nothing of it for too long."""


@dataclass(frozen=True, slots=True)
class Removal:
    address: str
    departure: Departure


@dataclass(frozen=True, slots=True)
class MembershipDelta:
    """Changes up to ``version``, or with ``full`` the whole list. Removals come before additions.

    Versions of different incarnations of a manager cannot be compared.
    """

    incarnation: int
    version: int
    full: bool = False
    members: tuple[Member, ...] = ()
    removed: tuple[Removal, ...] = ()


@dataclass(frozen=True, slots=True)
class Watch:
    """Request of a watcher: changes after ``version`` of ``incarnation``, of one model and some kinds."""

    incarnation: int = 0
    version: int = 0
    model: str = ""
    """Empty for all models."""
    kinds: tuple[MemberKind, ...] = ()
    """Empty for all kinds."""
    metrics: str = ""
    """``HOST:PORT`` of the admin port of a watcher that is no member; else empty."""

    def wants(self, kind: MemberKind, model: str) -> bool:
        return (not self.kinds or kind in self.kinds) and self.model in ("", model)


class MemberCondition(StrEnum):
    """A member as its pool manager sees it, by what it said last. Watchers are told ``MemberState``, which knows no "drained"."""

    ACTIVE = "active"
    LEAVING = "leaving"
    """The member drains."""
    DRAINED = "drained"
    """No work is left on the member; it can be stopped."""


def served(registration: Registration, load: InstanceLoad) -> frozenset[Stage]:
    """The stages that a member serves, by its last report if it can switch."""
    if registration.switchable is not None and load.stages:
        return frozenset(load.stages)
    return frozenset() if registration.role is None else registration.role.stages


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member as the manager sees it. Times are in seconds before now."""

    registration: Registration
    condition: MemberCondition
    suspected: bool
    load: InstanceLoad
    since_s: float
    """Time in this condition, seconds."""
    heard_s: float
    """Time since its last report."""
    wanted: Role | None = None
    """Role that this manager ordered it to switch to last; None without an order."""
    wanted_s: float = 0.0
    """The order is so old."""
    open_s: float = 0.0
    """The open stages have been so for so long."""
    served_s: float | None = None
    """Time from that order until each stage that it opened had served a request or item, seconds. None before, and
    where it opens none.
    """

    @property
    def open(self) -> frozenset[Stage]:
        """The stages that it serves, by its last report if it can switch."""
        return served(self.registration, self.load)

    @property
    def stays_open(self) -> frozenset[Stage]:
        """Open stages that it is not ordered to leave."""
        return self.open if self.wanted is None else self.open & self.wanted.stages

    @property
    def is_as_wanted(self) -> bool:
        return self.wanted is None or self.open == self.wanted.stages


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The members of one model, role and tier; routers have no role."""

    model: str
    role: Role | None
    members: tuple[MemberStatus, ...]
    scaling: ScalingStatus | None = None
    """Scaling of the pool. None for routers, and before the first decision."""
    tier: str = ""
    """Tier of hardware; empty without tiers."""

    @property
    def name(self) -> PoolName | None:
        """None for routers."""
        return None if self.role is None else PoolName(self.model, self.role, self.tier)


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    """The state of a pool manager."""

    incarnation: int
    version: int
    up_s: float
    watchers: int
    pools: tuple[PoolStatus, ...]
    leads: bool = True
    """Whether it decides on the size of pools; otherwise ``leader`` does."""
    leader: str = ""
    """The name of the manager that leads; empty if it is not known, or if there is only this one."""
    store_fault: str = ""
    """Why the store does not answer; empty if it does, or if there is none."""
    plan: PlanStatus | None = None
    """The plan that is followed; None without one."""


@dataclass(frozen=True, slots=True)
class ManualSize:
    """A person wants a pool to have this size for a time, within its bounds. ``size`` None ends an earlier one."""

    model: str
    role: Role
    size: int | None
    for_s: float = 0.0
    tier: str = ""
    """Tier of hardware; empty without tiers."""

    @property
    def pool(self) -> PoolName:
        return PoolName(self.model, self.role, self.tier)
