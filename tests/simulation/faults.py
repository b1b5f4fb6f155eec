"""What goes wrong in a simulated cluster whose managers scale it: a plan from a seed, and carrying it out."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

from tests.simulation.cluster import EncoderNode, ManagerNode, Scaled, SimCluster
from tests.simulation.scaling import QUICK_S
from triptych.domain.pool import ManualSize
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.errors import DeadlineExceeded, NotFound, Unavailable
from triptych.virtual.links import LinkedPoolManager

T = TypeVar("T")


class Kind(StrEnum):
    """``ON_REQUESTS`` are those that a request can notice."""

    ENCODER_DIES = "an encoder dies"
    TEXT_DIES = "a text instance dies"
    INSTANCE_HANGS = "an instance hangs"
    CUT_OFF = "an instance is cut off from the managers"
    DRAIN = "an operator drains an instance"
    MANAGER_DIES = "a manager dies"
    MANAGER_HANGS = "a manager does not answer"
    MANAGER_CUT_OFF = "a manager is cut off from some of its members"
    LEADER_STOPPED = "the leader is stopped past its lease, in the middle of its orders"
    STORE_AWAY = "the store is away"
    STORE_AWAY_FOR_ONE = "the store is away for one manager"
    STORE_EMPTIED = "the store loses everything"
    SCALER_SLOW = "the scaler is slow"
    SCALER_FAILS = "the scaler fails"
    CRASH_AT_START = "what starts crashes"
    NO_MACHINE = "nothing can be started"
    RESIZE = "an operator sets a size"


ON_REQUESTS = frozenset((Kind.ENCODER_DIES, Kind.TEXT_DIES, Kind.INSTANCE_HANGS))
ON_INSTANCES = ON_REQUESTS | {Kind.CUT_OFF, Kind.DRAIN}
ON_MANAGERS = frozenset(
    (
        Kind.MANAGER_DIES,
        Kind.MANAGER_HANGS,
        Kind.MANAGER_CUT_OFF,
        Kind.LEADER_STOPPED,
        Kind.STORE_AWAY_FOR_ONE,
    )
)
RESIZED_S = 20.0
"""How long a size that an operator sets is kept."""
LEASE_S = 10.0
"""Default ``lease_ttl_s``."""
SLOW_S = (2.0, 8.0)
"""Latency of a scaler that is slow."""
_EVERY_S = 8.0
"""One fault per so many seconds, on average."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One fault. ``pick`` chooses what it concerns."""

    at_s: float
    kind: Kind
    lasts_s: float
    pick: float


def plan(seed: int, duration_s: float) -> list[Trouble]:
    """The faults of a run. In every fourth run they are all of kinds that no request notices."""
    rng = Random(f"{seed}/faults")
    kinds = [kind for kind in Kind if seed % 4 or kind not in ON_REQUESTS]
    drawn: list[Kind] = []
    while len(drawn) < duration_s / _EVERY_S:
        drawn += rng.sample(kinds, len(kinds))
    return sorted(
        (
            Trouble(rng.uniform(1, duration_s), kind, _lasts_s(kind, rng), rng.random())
            for kind in drawn[: round(duration_s / _EVERY_S)]
        ),
        key=lambda trouble: trouble.at_s,
    )


def _lasts_s(kind: Kind, rng: Random) -> float:
    if kind is Kind.LEADER_STOPPED:
        return rng.uniform(1.1, 2.0) * LEASE_S
    return rng.choice((1.0, 6.0, 15.0))


End = Callable[[], object]


class Faults:
    """Carries out a plan on a cluster that is scaled. Faults may overlap."""

    def __init__(self, cluster: SimCluster, scaled: Scaled) -> None:
        self._cluster = cluster
        self._scaled = scaled
        self._bounds = cluster.world.bounds
        self._rng = cluster.rng("victims")

    async def run(self, troubles: Iterable[Trouble]) -> None:
        """Until the last one is over."""
        async with asyncio.TaskGroup() as group:
            for trouble in troubles:
                group.create_task(self._one(trouble), name=trouble.kind)

    async def _one(self, trouble: Trouble) -> None:
        await asyncio.sleep(trouble.at_s)
        end = await self._begin(trouble.kind, trouble.pick)
        await asyncio.sleep(trouble.lasts_s)
        end()

    async def _begin(self, kind: Kind, pick: float) -> End:
        if kind in ON_INSTANCES:
            return await self._at_instance(kind, pick)
        if kind in ON_MANAGERS:
            return await self._at_manager(kind, _picked(pick, self._managers()))
        return await self._at_shared(kind, pick)

    async def _at_instance(self, kind: Kind, pick: float) -> End:
        role = {Kind.ENCODER_DIES: Role.E, Kind.TEXT_DIES: Role.PD}.get(kind)
        nodes = [process for process in self._cluster.processes.values() if process.is_up]
        if role is not None:
            nodes = [node for node in nodes if isinstance(node, EncoderNode) == (role is Role.E)]
        if not nodes:
            return _nothing
        node = _picked(pick, nodes)
        match kind:
            case Kind.INSTANCE_HANGS:
                node.hang()
                return node.go_on
            case Kind.CUT_OFF:
                return _cut(self._managers(), (node.name,))
            case Kind.DRAIN:
                await ask(self._cluster, lambda manager: manager.drain_instance(node.name, force=True))
            case _:
                await self._scaled.processes.lose(node.name, "signal 9")
        return _nothing

    async def _at_manager(self, kind: Kind, manager: ManagerNode) -> End:
        match kind:
            case Kind.MANAGER_DIES:
                await manager.kill()
                return manager.start_again
            case Kind.MANAGER_HANGS:
                manager.hang()
                return manager.go_on
            case Kind.MANAGER_CUT_OFF:
                names = sorted(manager.links)
                return _cut([manager], self._rng.sample(names, self._rng.randint(1, len(names))))
            case Kind.LEADER_STOPPED:
                leader = next((other for other in self._managers() if other.leads), manager)
                leader.pause()
                return leader.go_on
            case _:
                return _set([manager.store], "cut", bad=True, well=False)

    async def _at_shared(self, kind: Kind, pick: float) -> End:
        processes, managers = self._scaled.processes, self._managers()
        match kind:
            case Kind.STORE_AWAY:
                return _set([manager.store for manager in managers], "cut", bad=True, well=False)
            case Kind.STORE_EMPTIED:
                self._scaled.store.lose_everything()
            case Kind.CRASH_AT_START:
                return _set([processes], "crashes", bad=True, well=False)
            case Kind.NO_MACHINE:
                return _set([processes], "refuses", bad=True, well=False)
            case Kind.SCALER_SLOW:
                return _set([manager.scaler for manager in managers], "latency_s", bad=SLOW_S, well=QUICK_S)
            case Kind.SCALER_FAILS:
                return _set([manager.scaler for manager in managers], "failing", bad=0.7, well=0.0)
            case _:
                name = _picked(pick, [pool.name for pool in await self._scaled.scaler.pools()])
                size = self._rng.randint(self._bounds.least, self._bounds.most)
                await set_by_hand(self._cluster, name, size, RESIZED_S)
        return _nothing

    def _managers(self) -> list[ManagerNode]:
        return list(self._cluster.managers.values())


async def ask(cluster: SimCluster, order: Callable[[LinkedPoolManager], Awaitable[None]]) -> None:
    """Give an operator's order to the first manager that takes it."""
    for manager in cluster.managers.values():
        with suppress(NotFound, Unavailable, DeadlineExceeded):
            await order(manager.way("operator"))
            return


async def set_by_hand(cluster: SimCluster, pool: PoolName, size: int, for_s: float) -> None:
    order = ManualSize(pool.model, pool.role, size, for_s)
    await ask(cluster, lambda manager: manager.set_size(order))


def _cut(managers: Sequence[ManagerNode], names: Sequence[str]) -> End:
    links = [(manager, name) for manager in managers for name in names if name in manager.links]
    for manager, name in links:
        manager.links[name].kill()

    def join() -> None:
        for manager, name in links:
            if manager.is_up:
                manager.links[name].restart(manager.service)

    return join


def _set(things: Sequence[object], name: str, *, bad: object, well: object) -> End:
    for faulty in things:
        setattr(faulty, name, bad)

    def heal() -> None:
        for faulty in things:
            setattr(faulty, name, well)

    return heal


def _picked(pick: float, choices: Sequence[T]) -> T:
    return choices[int(pick * len(choices))]


def _nothing() -> None:
    """Do nothing for a fault that is over by itself."""
