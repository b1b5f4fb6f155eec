"""Rolls pools to another tensor-parallel degree: tells the scaler, sets the size meanwhile, and drains one instance after the other."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from triptych.domain.decision import Bounds, Override, PoolInstance, Why
from triptych.domain.pool import MemberStatus
from triptych.domain.scaling import PoolName
from triptych.domain.stage import ModelPart, Role
from triptych.domain.store import Fence
from triptych.errors import FailedPrecondition, InvalidRequest, TriptychError, Unavailable
from triptych.machine.pool_manager.pool import PoolMachine
from triptych.machine.pool_manager.pool_events import Noted, OverrideEnded, OverrideSet, PoolEvent
from triptych.machine.pool_manager.rolling import DrainForDegree, RollEnded, RollMachine, RollOutcome
from triptych.ports import Scaler
from triptych.runtime.tasks import TaskScope

logger = logging.getLogger(__name__)

_HELD_S = 86_400.0
"""The size while a pool rolls is held for at most so long: if this manager ends meanwhile, the pool follows its load again then."""
_SETTLES_S = 60.0
"""After an aborted roll the size before it is held for so long, so that what starts is taken back."""


class Rolled(Protocol):
    """A pool of the control loop."""

    name: PoolName
    machine: PoolMachine
    roll: RollMachine | None


class Rolls:
    """Begins the rolls of pools, and carries out what their machines decide."""

    def __init__(
        self,
        scaler: Scaler,
        *,
        fence: Callable[[], Fence | None],
        feed: Callable[..., None],
        drain: Callable[[str, str], None],
        patience: float,
        timeout_s: float,
        scope: TaskScope,
    ) -> None:
        """``feed`` passes an event to a pool, ``drain`` lets a member drain, for a reason. ``patience`` is a multiple of the usual start time."""
        self._scaler = scaler
        self._fence = fence
        self._feed: Callable[[Rolled, PoolEvent], None] = feed
        self._drain = drain
        self._patience = patience
        self._timeout_s = timeout_s
        self._scope = scope
        self._degrees: dict[PoolName, dict[str, int]] = {}
        """Degrees of the members of each pool, by instance id."""
        self._beginning = asyncio.Lock()
        """While an order is taken: the scaler is asked before the roll is known here."""
        self._before: dict[PoolName, Override] = {}
        """Sizes by hand that hold again after a roll."""

    async def begin(self, pool: Rolled, degree: int, bounds: Bounds, reason: str, now_s: float) -> None:
        """Raises InvalidRequest, FailedPrecondition, Unavailable, as ``ports.PoolManager.roll``."""
        async with self._beginning:
            await self._begin(pool, degree, bounds, reason, now_s)

    async def _begin(self, pool: Rolled, degree: int, bounds: Bounds, reason: str, now_s: float) -> None:
        degrees, size = self._degrees.get(pool.name, {}), pool.machine.wanted
        if pool.roll is not None:
            raise FailedPrecondition(f"pool {pool.name} {pool.roll}")
        if not degrees or not size:
            raise FailedPrecondition(f"pool {pool.name} has no instance that could be replaced")
        if set(degrees.values()) == {degree}:
            raise InvalidRequest(f"all instances of pool {pool.name} have degree {degree}", param="degree")
        if size + 1 > bounds.most:
            text = f"pool {pool.name} has its largest size, {bounds.most}: one instance more must fit while it rolls"
            raise FailedPrecondition(text)
        await self._set_degree(pool.name, degree)
        others = Counter(of for of in degrees.values() if of != degree)
        view = pool.machine.view
        start_s = 60.0 if view is None else view.start_s
        if (before := pool.machine.kept(now_s).override) is not None:
            self._before[pool.name] = before
        pool.roll = RollMachine(
            degree, others.most_common(1)[0][0], size, patience_s=self._patience * start_s, now_s=now_s
        )
        self._feed(pool, Noted(Why.DEGREE, f"degree {degree} instead of {pool.roll.before}: {reason}"))
        self._feed(pool, OverrideSet(pool.roll.wanted, _HELD_S))

    async def begin_by_itself(self, pool: Rolled, degree: int, bounds: Bounds, reason: str, now_s: float) -> None:
        """As ``begin``; why it cannot is recorded among the decisions."""
        try:
            await self.begin(pool, degree, bounds, reason, now_s)
        except TriptychError as error:
            self._feed(pool, Noted(Why.DEGREE, f"degree {degree}: {reason}; not rolled: {error.message}", advised=True))

    def tick(
        self, pool: Rolled, instances: Sequence[PoolInstance], members: Sequence[MemberStatus], now_s: float
    ) -> None:
        """Go on with a roll. ``instances`` are those of the pool, ``members`` those that have registered."""
        self._degrees[pool.name] = {member.registration.instance_id: _degree(member) for member in members}
        if (roll := pool.roll) is None:
            return
        if self._fence() is None:
            pool.roll = None
            return
        wanted = roll.wanted
        for effect in roll.handle(instances, self._degrees[pool.name], now_s):
            match effect:
                case DrainForDegree(name, reason):
                    self._drain(name, f"it gets a successor with another degree: {reason}")
                case RollEnded(outcome, reason):
                    self._end(pool, roll, outcome, reason)
                    return
        if roll.wanted != wanted:
            self._feed(pool, OverrideSet(roll.wanted, _HELD_S))

    def forget(self, name: PoolName) -> None:
        """The pool is gone."""
        self._degrees.pop(name, None)
        self._before.pop(name, None)

    def _end(self, pool: Rolled, roll: RollMachine, outcome: RollOutcome, reason: str) -> None:
        pool.roll = None
        before = self._before.pop(pool.name, None)
        self._feed(pool, Noted(Why.DEGREE, f"{outcome}: {reason}"))
        if outcome is RollOutcome.ABORTED:
            logger.warning("pool %s: %s", pool.name, reason)
            self._feed(pool, OverrideSet(roll.size, _SETTLES_S))
            self._scope.spawn(self._keep_degree(pool.name, roll.before), name=f"degree of {pool.name}")
        elif before is not None:
            self._feed(pool, OverrideSet(before.size, before.left_s))
        else:
            self._feed(pool, OverrideEnded())

    async def _keep_degree(self, name: PoolName, degree: int) -> None:
        try:
            await self._set_degree(name, degree)
        except TriptychError as error:
            logger.warning("pool %s: the scaler has not the degree %d again: %s", name, degree, error.message)

    async def _set_degree(self, name: PoolName, degree: int) -> None:
        """Raises what the scaler does, and Unavailable if it does not answer or another manager leads."""
        if (fence := self._fence()) is None:
            raise Unavailable("another manager leads")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._scaler.set_degree(name, degree, fence.token)
        except TimeoutError:
            raise Unavailable(f"the scaler did not answer within {self._timeout_s:g} s") from None


def _degree(member: MemberStatus) -> int:
    """The tensor-parallel degree of the part by which its pool counts; 1 if it does not say."""
    kind = ModelPart.ENCODER if member.registration.role is Role.E else ModelPart.DECODER
    parts = (part.identity for part in member.registration.parts)
    return next((identity.tensor_parallel for identity in parts if identity.part is kind), 1)
