"""Advises on the size of each pool, from routers' reports. Nothing is ordered: a person or another system acts."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from prometheus_client.core import Metric

from triptych.domain.decision import (
    Bounds,
    DecisionRecord,
    InstancePhase,
    PoolFacts,
    PoolInstance,
    PoolState,
    ScalingStatus,
)
from triptych.domain.pool import Condition, ManualSize, MemberStatus, PoolStatus, Registration
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role, Stage
from triptych.domain.windows import ClassWindow, WindowReport
from triptych.errors import InvalidRequest, NotFound
from triptych.machine.pool_manager.pool_events import (
    InstancesSeen,
    OverrideEnded,
    OverrideSet,
    RecordDecision,
    Reported,
    RouterGone,
    Tick,
)
from triptych.machine.pool_manager.pools import PoolLimits, PoolSettings, PoolsMachine
from triptych.policy.scaling import ScalingLimits
from triptych.ports import Clock
from triptych.runtime.metrics import gauge, total

logger = logging.getLogger(__name__)

_MAX_POOLS = 256
_START_S = 60.0
"""Assumed time until an instance is ready: without a profile it is unknown."""
_PHASES = {
    Condition.ACTIVE: InstancePhase.READY,
    Condition.LEAVING: InstancePhase.DRAINING,
    Condition.DRAINED: InstancePhase.DRAINED,
}


class Advice:
    """One ``PoolsMachine`` in advisory mode per pool that has members."""

    def __init__(self, *, max_instances: int, clock: Clock) -> None:
        self._bounds = Bounds(1, max_instances)
        self._clock = clock
        self._machines: dict[PoolName, PoolsMachine] = {}
        self._routers: dict[str, str] = {}
        """The model of each router that has reported."""

    def report(self, router: Registration, report: WindowReport) -> None:
        self._routers[router.instance_id] = router.model
        for name, machine in self._machines.items():
            if name.model == router.model:
                machine.handle(Reported(router.instance_id, report), self._clock())

    def tick(self, pools: Sequence[PoolStatus]) -> None:
        """Decide, given the members now."""
        now_s = self._clock()
        there = {PoolName(pool.model, pool.role): pool for pool in pools if pool.role is not None}
        routers = {one.registration.instance_id for pool in pools if pool.role is None for one in pool.members}
        for name in self._machines.keys() - there.keys():
            del self._machines[name]
        for gone in self._routers.keys() - routers:
            del self._routers[gone]
            for machine in self._machines.values():
                machine.handle(RouterGone(gone), now_s)
        for name, pool in there.items():
            if name not in self._machines and len(self._machines) < _MAX_POOLS:
                self._machines[name] = self._machine(name, pool, now_s)
            if (known := self._machines.get(name)) is not None:
                self._decide(known, str(name), pool, now_s)

    def set_size(self, order: ManualSize) -> None:
        """As ``ports.PoolManager.set_size``."""
        if (machine := self._machines.get(order.pool)) is None:
            raise NotFound("no pool has this model and role", param="role")
        if order.size is None:
            machine.handle(OverrideEnded(str(order.pool)), self._clock())
            return
        if not self._bounds.least <= order.size <= self._bounds.most:
            text = f"size is {order.size}, must be from {self._bounds.least} to {self._bounds.most}"
            raise InvalidRequest(text, param="size")
        if not order.for_s > 0:
            raise InvalidRequest("a size by hand needs a time after which it ends", param="for_s")
        machine.handle(OverrideSet(str(order.pool), order.size, order.for_s), self._clock())

    def _machine(self, name: PoolName, pool: PoolStatus, now_s: float) -> PoolsMachine:
        encodes = name.role.serves(Stage.ENCODE)
        settings = PoolSettings(
            str(name),
            name.role,
            self._bounds,
            initial=len(pool.members),
            start_s=_START_S,
            facts=partial(_unknown, "profile of the encoder" if encodes else "profile of the language model"),
        )
        return PoolsMachine((settings,), scaling=ScalingLimits(), limits=PoolLimits(), now_s=now_s, advisory=True)

    def _decide(self, machine: PoolsMachine, name: str, pool: PoolStatus, now_s: float) -> None:
        machine.handle(InstancesSeen(name, tuple(map(_instance, pool.members))), now_s)
        for effect in machine.handle(Tick(), now_s):
            if isinstance(effect, RecordDecision):
                _log(effect.record)

    # --- readers -----------------------------------------------------------------------------------------------------

    def records(self, model: str, role: Role) -> tuple[DecisionRecord, ...]:
        """The last decisions on a pool, oldest first; empty for an unknown one."""
        name = PoolName(model, role)
        machine = self._machines.get(name)
        return () if machine is None else machine.records(str(name), self._clock())

    def status(self) -> dict[PoolName, ScalingStatus]:
        """The size of each pool."""
        now_s = self._clock()
        return {name: machine.status(now_s)[0] for name, machine in self._machines.items()}

    def metrics(self) -> Iterable[Metric]:
        labels = ("model_name", "role")
        found = {(name.model, name.role.value): one for name, one in self.status().items()}
        advised: dict[tuple[str, ...], float] = {
            name: one.decisions[-1].target for name, one in found.items() if one.decisions
        }
        yield gauge(
            "triptych_pool_advised_instances", "Size that the last decision on the pool advises", advised, labels
        )
        yield gauge(
            "triptych_pool_attainment",
            "Share of requests without a missed TTFT that the pool is charged with, over 60 s",
            {name: share for name, one in found.items() if (share := one.attainment.attainment) is not None},
            labels,
        )
        yield gauge(
            "triptych_pool_state",
            "1 for the pool's state",
            {(*name, state.value): float(one.state is state) for name, one in found.items() for state in PoolState},
            (*labels, "state"),
        )
        yield total(
            "triptych_pool_reports_dropped",
            "Reports of routers that were not counted",
            {
                (name.model, name.role.value, cause.value): number
                for name, machine in self._machines.items()
                for cause, number in machine.dropped.items()
            },
            (*labels, "cause"),
        )


def _unknown(what: str, classes: Mapping[str, ClassWindow]) -> PoolFacts:
    del classes
    return PoolFacts(missing=(what,))


def _instance(member: MemberStatus) -> PoolInstance:
    loads = member.load.stages.values()
    return PoolInstance(
        member.registration.instance_id,
        _PHASES[member.condition],
        age_s=member.since_s,
        running=sum(load.pending for load in loads),
        leased_bytes=sum(load.leased_bytes for load in loads),
    )


def _log(record: DecisionRecord) -> None:
    view, decision = record.view, record.decision
    reasons = "; ".join(f"{one.why}: {one.text}" for one in decision.reasons)
    missing = f"; missing: {', '.join(decision.missing)}" if decision.missing else ""
    logger.info("pool %s: %d instances, advised %d: %s%s", view.pool, view.wanted, decision.target, reasons, missing)
