"""View of the scaler's pools, which the manager that leads asks for once per second, and others now and then."""

import asyncio
import logging
from collections.abc import Callable

from triptych.domain.scaling import PoolName, ScaledInstance, ScaledPool
from triptych.errors import TriptychError
from triptych.ports import Clock, Scaler

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_FOLLOW_S = 5.0
"""Interval of a manager that does not lead, seconds: a scaler may ask others itself, for each pool. It is less than the
time after which an instance that stays failed counts once more (``machine.pool_manager.starting``).
"""


class ScalerView:
    """The scaler's last answer, and why there is no newer one."""

    def __init__(self, scaler: Scaler, *, at: str, timeout_s: float, leads: Callable[[], bool], clock: Clock) -> None:
        """Make a view. ``at`` is the scaler's address, for the log; ``leads`` is whether this manager leads."""
        self._scaler = scaler
        self._at = at
        self._timeout_s = timeout_s
        self._leads = leads
        self._clock = clock
        self._pools: dict[PoolName, ScaledPool] = {}
        self.answered = False
        """Whether the scaler has answered once."""
        self.fault = ""
        """Why it did not answer last; empty if it did."""

    def __contains__(self, name: PoolName) -> bool:
        """Whether it has such a pool, even if that is empty."""
        return name in self._pools

    def existing(self) -> list[PoolName]:
        """Pools that somebody wants: one that could exist, and is empty, is none, unless it is a tier, which may grow again."""
        return [name for name, pool in self._pools.items() if pool.instances or pool.wanted or name.tier]

    def wanted(self, name: PoolName) -> int | None:
        """The size that was ordered last; None if it does not know one."""
        pool = self._pools.get(name)
        return None if pool is None else pool.wanted

    def instances(self, name: PoolName) -> tuple[ScaledInstance, ...]:
        pool = self._pools.get(name)
        return () if pool is None else pool.instances

    async def run(self) -> None:
        """Ask the scaler until cancelled."""
        asked_s = self._clock() - _FOLLOW_S
        while True:
            if self._leads() or self._clock() - asked_s >= _FOLLOW_S:
                await self.ask()
                asked_s = self._clock()
            await asyncio.sleep(_POLL_S)

    async def ask(self) -> None:
        """Now, for at most the time of a call."""
        fault = await self._ask()
        if fault and fault != self.fault:
            logger.warning("the scaler at %s fails: %s", self._at, fault)
        elif self.fault and not fault:
            logger.info("the scaler at %s answers again", self._at)
        self.fault = fault

    async def _ask(self) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                scaled_pools = await self._scaler.pools()
        except TimeoutError:
            return f"it did not answer within {self._timeout_s:g} s"
        except TriptychError as error:
            return str(error)
        except Exception:
            logger.exception("the scaler has a defect")
            return "it has a defect"
        self._pools = {pool.name: pool for pool in scaled_pools}
        self.answered = True
        return ""
