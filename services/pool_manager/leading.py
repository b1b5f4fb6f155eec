"""Leadership of this manager: whether it leads, what the leader before it has left, and what the next one needs to
know.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from triptych.domain.decision import Bounds, DecisionRecord, PoolView, SavedPool
from triptych.domain.scaling import PoolName
from triptych.domain.store import Fence
from triptych.errors import Deposed, Overloaded, StoreCorrupt, StoreUnavailable, Unavailable
from triptych.ports import Clock, Store
from triptych.runtime.tasks import TaskScope
from triptych.store.leadership import Leadership, LeaseTimes

from .histories import Histories
from .keeper import Keeper, Left, later

logger = logging.getLogger(__name__)

_LEASE = "pool-manager"
_KEEP_S = 0.5
_FOLLOW_S = 5.0
"""Interval at which a manager that does not lead looks at what the leader keeps, seconds."""
_GONE_S = 60.0
"""Time after which state that the leader before has left of a pool is forgotten if that pool is not found, seconds."""
_MAX_WAITING = 8
"""Writers that wait for the store; each takes at most the time of a call."""


class Pools(Protocol):
    """The pools of this manager, by name."""

    def kept(self) -> Mapping[PoolName, SavedPool]:
        """State of each pool that the next leader needs."""
        ...

    def resume(self, name: PoolName, kept: SavedPool | None, records: tuple[DecisionRecord, ...] = ()) -> None:
        """Go on from what the leader before has left; None: what is known here is newer, or nothing was left."""
        ...

    async def look(self) -> None:
        """Learn which instances there are now; a manager that does not lead looks seldom."""
        ...

    def first(self, name: PoolName) -> SavedPool | None:
        """A pool of which nothing is kept; None for the instances that it has."""
        ...


class Leading:
    """Holds the lease, and reads and writes what leaders hand over. While the store is away nobody leads."""

    def __init__(self, store: Store, pools: Pools, *, lease: LeaseTimes, owner: str, clock: Clock, hour: Clock) -> None:
        """``owner`` names this manager; ``hour`` is as in ``Histories``."""
        self._store = store
        self._pools = pools
        self._owner = owner
        self._clock = clock
        self._leadership = Leadership(store, lease=_LEASE, owner=owner, times=lease, clock=clock)
        self._keeper = Keeper(store, clock, owner)
        self._histories = Histories(store, clock, hour)
        self._lock = asyncio.Lock()
        """Held from the reading of a pool until it is written: no older state is written over a newer one."""
        self._waiting = 0
        self._taken: Fence | None = None
        """The fence under which the state of the leader before was taken over."""
        self._leader = ""
        self._left: dict[str, Left] = {}
        """State in the store when it was last read, of pools that were not found since."""
        self._left_s = 0.0
        self._records: dict[str, tuple[DecisionRecord, ...]] = {}
        """The decisions on these."""
        self._fault = ""
        """Why the store was not read or written last; empty if it was."""

    def start(self, scope: TaskScope) -> None:
        scope.spawn(self._leadership.run(), name="leadership", vital=True)
        scope.spawn(self._run(), name="keeper", vital=True)

    @property
    def fence(self) -> Fence | None:
        """The proof to send with an order; None unless this manager leads now, and knows what was decided before."""
        fence = self._leadership.fence
        return fence if fence is not None and fence == self._taken else None

    @property
    def leads(self) -> bool:
        """Whether this manager decides on sizes."""
        return self.fence is not None

    @property
    def leader(self) -> str:
        """The manager that leads, as far as this one knows."""
        return self._leader

    @property
    def store_fault(self) -> str:
        """Why the store does not answer; empty if it does."""
        return self._store.fault or self._fault

    def why_not(self) -> str:
        """Why nothing may be ordered now; empty if it may."""
        fence = self._leadership.fence
        if fence is None and self._store.fault:
            return f"the store does not answer: {self._store.fault}"
        if fence is None:
            return "another manager leads" if self._leader not in ("", self._owner) else "no manager leads yet"
        if fence != self._taken:
            fault = f": {self._fault}" if self._fault else ""
            return f"this manager begins to lead, and reads what was decided before{fault}"
        return ""

    def pool_found(self, name: PoolName) -> None:
        """A pool was just found: it goes on from what was left of it."""
        left, records = self._left.pop(str(name), None), self._records.pop(str(name), ())
        if left is not None:
            self._pools.resume(name, later(left.pool, self._clock() - self._left_s), records)
        else:
            self._pools.resume(name, None if self._taken is None else self._pools.first(name))

    def note(self, record: DecisionRecord) -> None:
        """Keep a decision, if this manager leads."""
        if self.fence is not None:
            self._keeper.note(record)

    def observe(self, view: PoolView) -> None:
        """Keep the load of a pool."""
        self._histories.observe(view)

    def initial_size(self, name: PoolName, bounds: Bounds) -> int:
        """Size that the load of this hour needed in earlier weeks."""
        return self._histories.initial_size(str(name), bounds)

    @asynccontextmanager
    async def writing(self) -> AsyncGenerator[Callable[[str, SavedPool], Awaitable[None]]]:
        """Gives a function that writes a pool before anybody else reads or writes one.

        Raises Unavailable unless this manager leads, Overloaded when too many wait for a slow store, and what
        ``Keeper.keep`` raises.
        """
        if self._waiting >= _MAX_WAITING:
            raise Overloaded(f"{self._waiting} sizes are being written to the store, which is slow: try again")
        self._waiting += 1
        try:
            async with self._lock:
                fence = self.fence
                if fence is None:
                    raise Unavailable(f"sizes cannot be set here now: {self.why_not()}")
                yield partial(self._keeper.keep, fence=fence)
        except Deposed:
            raise Unavailable("another manager leads now: set the size there") from None
        finally:
            self._waiting -= 1

    # --- the store ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Take over from the leader before, and write what the next one needs to know."""
        read_s = -_FOLLOW_S
        while True:
            fence = self._leadership.fence
            try:
                if fence is None and self._clock() - read_s >= _FOLLOW_S:
                    read_s = self._clock()
                    await self._follow()
                    self._fault = ""
                elif fence is not None:
                    await (self._write(fence) if fence == self._taken else self._take_over(fence))
                    self._fault = ""
            except Deposed:
                logger.info("another manager leads: nothing more is written")
            except (StoreUnavailable, StoreCorrupt) as error:
                self._fault = str(error)  # the store has logged it
            await asyncio.sleep(_KEEP_S)

    async def _write(self, fence: Fence) -> None:
        async with self._lock:
            kept = {str(name): pool for name, pool in self._pools.kept().items()}
            await self._keeper.write(kept, fence)
        await self._histories.write(fence)
        if self._left and self._clock() - self._left_s >= _GONE_S:
            await self._keeper.drop(self._left.keys() - kept.keys(), fence)
            self._left, self._records = {}, {}

    async def _follow(self) -> None:
        """Show what the leader has decided."""
        self._leader = await self._store.holder(_LEASE) or ""
        self._left, self._left_s = await self._keeper.read(), self._clock()
        if self._leadership.fence is None:
            for name in self._pools.kept():
                left = self._left.pop(str(name), None)
                if left is not None and left.owner != self._owner:  # else what is known here is newer
                    self._pools.resume(name, left.pool)

    async def _take_over(self, fence: Fence) -> None:
        left = await self._keeper.read()
        records = await self._keeper.read_decisions()
        await self._histories.read()
        await self._pools.look()
        if self._leadership.fence != fence:
            return
        first, self._taken, self._leader = self._taken is None, fence, self._owner
        for name in self._pools.kept():
            kept, decisions = left.pop(str(name), None), records.pop(str(name), ())
            if kept is not None and kept.owner != self._owner:
                self._pools.resume(name, kept.pool, decisions)
            else:  # what is known here is newer
                self._pools.resume(name, self._pools.first(name) if kept is None and first else None)
        self._left, self._left_s, self._records = left, self._clock(), records
