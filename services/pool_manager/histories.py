"""The load of pools in earlier weeks: kept in the store, and what the first size of a pool follows from."""

import logging

from pydantic import TypeAdapter

from triptych.domain.decision import Bounds, PoolView
from triptych.domain.history import KeptHistory
from triptych.domain.store import Fence
from triptych.errors import InvalidRequest, Overloaded
from triptych.machine.pool_manager.history import LoadHistory
from triptych.policy.scaling import initial_size
from triptych.ports import Clock, Store

from .keeper import Table

logger = logging.getLogger(__name__)

_TABLE = "loads"
_WRITE_S = 60.0
_MAX_POOLS = 1024
_KEPT = TypeAdapter(KeptHistory)


class Histories:
    """Histories of the pools, one ``LoadHistory`` each. ``hour`` is the time in hours since the beginning of 1970, UTC.

    ``read`` and ``write`` raise StoreUnavailable and StoreCorrupt; ``write`` also Deposed.
    """

    def __init__(self, store: Store, clock: Clock, hour: Clock) -> None:
        self._store = store
        self._table = Table(store, _TABLE, _KEPT)
        self._clock = clock
        self._hour = hour
        self._pools: dict[str, LoadHistory] = {}
        self._written: dict[str, KeptHistory] = {}
        self._written_s = clock()

    def observe(self, view: PoolView) -> None:
        if view.pool in self._pools or len(self._pools) < _MAX_POOLS:
            self._pools.setdefault(view.pool, LoadHistory()).observe(view, int(self._hour()))

    def initial_size(self, pool: str, bounds: Bounds) -> int:
        """``policy.scaling.initial_size`` for this hour."""
        history = self._pools.get(pool, LoadHistory())
        return initial_size(history.same_hour(int(self._hour())), history.capacity_per_s, bounds)

    async def read(self) -> None:
        """Take over what an earlier leader has kept."""
        kept = await self._table.read()
        self._pools |= {name: LoadHistory(history) for name, history in kept.items()}
        self._written |= kept

    async def write(self, fence: Fence) -> None:
        """Write what has changed, at most once per minute."""
        if self._clock() - self._written_s < _WRITE_S:
            return
        self._written_s = self._clock()
        for name, history in self._pools.items():
            kept = history.kept()
            if kept == self._written.get(name):
                continue
            try:
                await self._store.put(_TABLE, name, _KEPT.dump_json(kept), fence=fence)
            except (InvalidRequest, Overloaded) as error:
                logger.warning("the history of pool %s cannot be kept in the store: %s", name, error)
            self._written[name] = kept
