"""Leadership: one process of several acts, as long as it can prove to itself that it holds the lease."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from triptych.domain.store import Fence
from triptych.errors import StoreCorrupt, StoreUnavailable
from triptych.ports import Clock, Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Times of the lease. A leader that dies is replaced after ``lease_ttl_s`` and at most one ``lease_retry_s``."""

    lease_ttl_s: float = 10.0
    """Time after which the lease of a leader that does not renew it ends, on the store's clock."""
    lease_margin_s: float = 2.0
    """A leader stops this much earlier on its own clock."""
    lease_retry_s: float = 2.0
    """Interval at which a leader renews the lease, and others try to acquire it, seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.lease_retry_s < self.lease_ttl_s - self.lease_margin_s < self.lease_ttl_s <= 3600:
            raise ValueError("0 < lease_retry_s < lease_ttl_s - lease_margin_s < lease_ttl_s <= 3600 must hold")


class Leadership:
    """Campaigns for a lease and keeps it while ``run`` runs.

    The lease ends here before it can end in the store: it counts from before the call that acquired or renewed it, on this
    process's monotonic clock, and ``lease_margin_s`` less. A leader that was paused or cut off from the store therefore
    finds, before its next action, that it no longer leads. What it had already sent is refused by its token.
    """

    def __init__(self, store: Store, *, lease: str, owner: str, times: LeaseTimes, clock: Clock) -> None:
        """``owner`` names this process and must be unique to it, restarts included."""
        self._store = store
        self._lease = lease
        self._owner = owner
        self._times = times
        self._clock = clock
        self._fence: Fence | None = None
        self._until_s = 0.0
        self._told: Fence | None = None
        self.on_change: Callable[[Fence | None], None] = lambda _: None
        """Called when leadership begins, and soon after it ends; set before ``run``. For what must be certain, ask ``fence``."""

    @property
    def fence(self) -> Fence | None:
        """The proof to send with the next order; None unless this process leads now. Ask again after every wait."""
        return self._fence if self._clock() < self._until_s else None

    async def run(self) -> None:
        """Campaign until cancelled; then give the lease back."""
        try:
            while True:
                self._tell()
                await self._try()
                self._tell()
                await asyncio.sleep(self._pause_s())
        finally:
            fence, self._fence = self._fence, None
            self._tell()
            if fence is not None:
                try:
                    await self._store.release(fence)
                except (StoreUnavailable, StoreCorrupt) as error:
                    logger.info("lease %s could not be given back: %s", self._lease, error)

    def _pause_s(self) -> float:
        """Pause until the next attempt, or until leadership ends, if that is sooner, seconds."""
        left_s = self._until_s - self._clock()
        return (
            min(self._times.lease_retry_s, left_s)
            if self._told is not None and left_s > 0
            else self._times.lease_retry_s
        )

    async def _try(self) -> None:
        sent_s = self._clock()
        try:
            fence = self.fence
            if fence is None or not await self._store.renew(fence, self._times.lease_ttl_s):
                self._fence = None
                sent_s = self._clock()
                fence = await self._store.acquire(self._lease, self._owner, self._times.lease_ttl_s)
        except (StoreUnavailable, StoreCorrupt):
            return  # the store says why (``Store.fault``); what is held goes on until it ends
        self._fence = fence
        self._until_s = sent_s + self._times.lease_ttl_s - self._times.lease_margin_s

    def _tell(self) -> None:
        now = self.fence
        if now != self._told:
            self._told = now
            logger.info("%s %s", "leading with" if now else "no longer leading with", self._lease)
            self.on_change(now)
